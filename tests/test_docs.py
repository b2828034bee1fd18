"""The examples of the guide pages, run as they stand. Emulated on CPU."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

import tpu_kernels
from tests.models.tiny_models import TinyModel

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("choose-blocks", "debug-a-fallback", "publish-a-kernel", "serving", "sharding", "training")


@pytest.mark.parametrize("page", PAGES)
def test_examples(page, tmp_path):
    """What pages may use without saying where it is from: torch, tpu_kernels, a one-layer Llama, an empty folder."""
    tpu_kernels.register()
    model = TinyModel("llama", {"num_hidden_layers": 1}).build("tpu_attention")
    tpu_kernels.reset()
    given = {"torch": torch, "tpu_kernels": tpu_kernels, "model": model, "folder": tmp_path}
    text = re.sub(r"^```.*$", "", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE)  # else a fence is expected output
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
        doctest.DocTestParser().get_doctest(text, given, page, f"{page}.md", 0), out=told.append
    )
    assert result.attempted >= 3 and result.failed == 0, "".join(told)


def test_every_page_with_examples_is_run():
    with_examples = {path.stem for path in DOCS.glob("*.md") if ">>> " in path.read_text()}
    assert with_examples == set(PAGES)
