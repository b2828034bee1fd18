"""The examples as a user runs them: one process, and two over gloo. Emulated on CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny_models import TinyModel

from .launch import ROOT

WORDS = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(125))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with one KV head, so that two processes must replicate attention, and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("model")
    TinyModel("llama", {"num_key_value_heads": 1}).build("sdpa").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def example(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT / "examples", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_generate_what_one_does(model):
    call = ("generate.py", str(model), "--prompt", "word1 word2 word3", "--prompt", "word9", "--max_new_tokens", "5")
    alone = example(*call)
    both = example("launch.py", "--nproc_per_node", "2", *call, "--eager")
    lines = [line for line in alone.splitlines() if line.startswith("word")]
    assert len(lines) == 2 and all(len(line.split()) >= 5 for line in lines), alone
    assert [line for line in both.splitlines() if line.startswith("word")] == lines
    assert "0 fell back" in alone and "0 fell back. (2 processes)" in both
    assert "2 processes on CPU, over gloo" in both
