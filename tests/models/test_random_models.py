"""Random tiny models with random padding, caches and generate() options: tpu_attention against eager in float32.

More of them, and new ones each time: `pytest tests/models/test_random_models.py -s --hypothesis-profile=long` (200).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tpu_kernels

from .tiny_models import DECODERS

LONG = settings.get_current_profile_name() == "long"
NEW = 5
WINDOWED = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3", "cohere2", "exaone4")
FIXED_HEADS = ("gpt2", "gpt_neox")  # no grouped heads in their configurations
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "several sequences": {"num_return_sequences": 2, "do_sample": True},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {},
}
ALONE = ("prompt lookup", "assisted")  # for one sequence and a dynamic cache only


@dataclass(frozen=True)
class Run:
    """One random model and one use of it."""

    model: str
    config: dict[str, Any] = field(hash=False)
    seed: int
    length: int
    pads: tuple[int, ...]
    padding: str
    use: str
    cache: str


@st.composite
def runs(draw: Any) -> Run:
    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    model = pick(*DECODERS)
    config: dict[str, Any] = {}
    if model not in FIXED_HEADS:
        config |= pick({}, {}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4})
    if model in WINDOWED:
        config |= {"sliding_window": pick(2, 6, 40)}
    use = pick("forward", "forward", *OPTIONS)
    length = pick(1, 5, 12, 33)
    batch = 1 if use in ALONE else pick(1, 3)
    pads = tuple(draw(st.integers(0, length - 1)) for _ in range(batch))
    padding = pick("none", "left", "right", "holes") if use == "forward" else pick("none", "left")
    cache = "dynamic" if use in ALONE else pick("dynamic", "static", "none")
    if use == "prefill in chunks" and cache == "none":  # which transformers refuses
        cache = "dynamic"
    return Run(model, config, draw(st.integers(0, 2**20)), length, pads, padding, use, cache)


def inputs(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(3, 120, (len(run.pads), run.length), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(run.pads):
        if run.padding == "left":
            mask[row, :pad] = 0
        elif run.padding == "right":
            mask[row, run.length - pad :] = 0
        elif run.padding == "holes":
            mask[row, torch.randperm(run.length, generator=generator)[:pad]] = 0
    return ids.masked_fill(mask == 0, 0), mask


def outcome(run: Run, implementation: str) -> dict[str, Any]:
    """Logits of the real tokens, or what generate() returns."""
    ids, mask = inputs(run)
    model = DECODERS[run.model].build(implementation, **run.config)
    options: dict[str, Any] = {"attention_mask": mask}
    with torch.no_grad():
        if run.use == "forward":
            return {"logits": model(ids, **options).logits[mask.bool()], "model": model}
        if run.use == "assisted":
            options["assistant_model"] = DECODERS[run.model].build(implementation, **{**run.config, "num_hidden_layers": 1})
        if run.cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        options |= {"use_cache": run.cache != "none", "do_sample": False} | OPTIONS[run.use]
        torch.manual_seed(run.seed)
        made = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, output_logits=True, output_scores=True,
                              return_dict_in_generate=True, **options)  # fmt: skip
    return {**made, "model": model}


def compare(run: Run) -> str:
    """"equal", or "tie" where two tokens that eager itself cannot tell apart in float32 were told apart; else it raises."""
    want = outcome(run, "eager")
    tpu_kernels.reset()
    got = outcome(run, "tpu_attention")
    table = tpu_kernels.explain(got["model"])
    assert {row.reason for row in table.rows} == {"kernel"}, f"{run}\n{table}"
    if run.use == "forward":
        torch.testing.assert_close(got["logits"], want["logits"], atol=1e-5, rtol=0, msg=lambda text: f"{run}\n{text}")
        return "equal"
    if "sequences_scores" in want and want["sequences_scores"] is not None:
        torch.testing.assert_close(got["sequences_scores"], want["sequences_scores"], atol=1e-5, rtol=0)
        if torch.equal(got["sequences"], want["sequences"]):
            return "equal"
        # Other beams of the same score, to within rounding.
        assert not torch.equal(got["logits"][0], want["logits"][0]), f"{run}: {got['sequences']} {want['sequences']}"
        return "tie"
    mine, theirs = (each["sequences"][:, run.length :] for each in (got, want))
    for step, (a, b) in enumerate(zip(got["logits"], want["logits"], strict=True)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0, msg=lambda text: f"{run}\n{text}")  # noqa: B023
        if not torch.equal(mine[:, step], theirs[:, step]):
            top = b.topk(2, -1).values
            assert (top[:, 0] - top[:, 1]).min() < 2e-5, f"{run}: {mine} {theirs}"
            return "tie"
    assert torch.equal(mine, theirs)
    return "equal"


def many(examples: int) -> Counter[str]:
    tpu_kernels.register()
    seen: Counter[str] = Counter()

    @given(runs())
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True,
              derandomize=not LONG, database=None)  # fmt: skip
    def collect(run):
        seen[compare(run)] += 1
        seen[f"{run.use}, {run.cache} cache"] += 1

    try:
        collect()
    finally:
        print(f"random models: {dict(seen)}")
    return seen


@pytest.mark.thorough
def test_random_models_equal_eager():
    assert many(5)["equal"] >= 4


@pytest.mark.slow
def test_many_random_models_equal_eager():
    examples = settings().max_examples // 100 if LONG else 40
    assert many(examples)["equal"] >= examples * 0.9
