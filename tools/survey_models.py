# ruff: noqa: E501
"""Which of transformers' model types work under attn_implementation="tpu_attention": tried, one by one, on tiny models.

    python tools/survey_models.py run [--types TYPE,TYPE] [--again]   fill docs/data/models.json (emulated on CPU)
    python tools/survey_models.py page                                write docs/models.md from it

For each type the same random weights run under "eager" and under "tpu_attention" in float32, on a padded batch of two. The
outputs at real tokens are compared, and for models that generate, three greedy tokens. A third run halves every query: how far
that moves the outputs says whether the comparison would notice a wrong attention.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # this checkout, installed or not

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "models.json"
PAGE = ROOT / "docs" / "models.md"

# Above this, a difference is a finding. Outputs are divided by the largest one (where that is over 1).
TOLERANCE = 1e-4
# Halved queries must move the outputs by this much, or the comparison proves little.
NOTICED = 1e-3
LENGTH, PAD, NEW = 66, 3, 3
MAX_PARAMETERS = 60_000_000
BATCH, SECONDS_A_TYPE = 64, 150

# The heads that are surveyed, in order of preference for a type that has several.
HEADS = (
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("speech seq2seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("masked LM", "MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("causal LM", "MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("image-text-to-text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("encoder", "MODEL_MAPPING", "AutoModel"),
)


def model_types() -> dict[str, str]:
    """Head to survey for each model type that has one."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds: dict[str, str] = {}
    for head, mapping, _ in HEADS:
        names = getattr(modeling_auto, mapping + "_NAMES")
        for model_type in names:
            if model_type in CONFIG_MAPPING:
                kinds.setdefault(model_type, head)
    return dict(sorted(kinds.items()))


def survey(model_type: str) -> dict[str, Any]:
    """One line of the table. Never raises for what the model itself does: the line says why it was not built or run."""
    import torch
    import transformers
    from tiny_configs import parameter_count, tiny_config
    from transformers.utils import logging as transformers_logging

    import tpu_kernels

    transformers_logging.set_verbosity_error()
    tpu_kernels.register()
    _register_halved()
    head = model_types()[model_type]
    auto_class = getattr(transformers, next(name for kind, _, name in HEADS if kind == head))
    row: dict[str, Any] = {"type": model_type, "head": head}
    try:
        config = tiny_config(model_type)
        count = parameter_count(config, auto_class)
        if count is not None and count > MAX_PARAMETERS:
            return row | {"status": "not built", "why": f"{count / 1e6:.0f} M parameters after shrinking"}
        torch.manual_seed(0)
        eager = auto_class.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except Exception as error:  # the model's own refusal is the answer
        return row | {"status": "not built", "why": _short(error)}
    _strengthen(eager)
    reasons = []
    for label, inputs in candidate_inputs(eager):
        try:
            want = _forward(eager, inputs)
            break
        except Exception as error:
            reasons.append(f"{label}: {_short(error)}")
    else:
        return row | {"status": "not run", "why": "; ".join(reasons) or "no inputs known for it"}
    row["inputs"] = label

    torch.manual_seed(0)
    try:
        ours = auto_class.from_config(tiny_config(model_type), attn_implementation="tpu_attention", dtype=torch.float32).eval()
    except KeyError as error:
        return row | {"status": "refused", "why": _short(error)}
    ours.load_state_dict(eager.state_dict())
    tpu_kernels.reset()
    try:
        got = _forward(ours, inputs)
    except Exception as error:
        return row | {"status": "raised", "why": _short(error)}
    row["error"] = _difference(got, want, inputs)
    table = tpu_kernels.explain(ours)
    row["routes"] = _routes(table)
    row["masks"] = sorted(table.masks)
    row["never_called"] = not table.total_calls
    if not table.total_calls:
        return row | {"status": "run"}
    if head in ("causal LM", "seq2seq", "speech seq2seq", "image-text-to-text"):
        row |= _compare_tokens(eager, ours, inputs)
        row["routes"] = _routes(tpu_kernels.explain(ours))
        row["masks"] = sorted(tpu_kernels.explain(ours).masks)
    if row["error"] is None or row["error"] > TOLERANCE or row.get("tokens") is False:
        with contextlib.suppress(ValueError):  # transformers' own refusal
            eager.set_attn_implementation("sdpa")
            row["error_sdpa"] = _difference(got, _forward(eager, inputs), inputs)
            if row["error"] is None and row["error_sdpa"] is not None:  # eager makes NaN of rows without keys
                row |= {"error": row["error_sdpa"], "reference": "sdpa"}
    ours.set_attn_implementation("survey_halved")
    row["noticed"] = _difference(_forward(ours, inputs), got, inputs)
    return row | {"status": "run"}


def _register_halved() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from tpu_kernels.attention import tpu_attention
    from tpu_kernels.masks import tpu_attention_mask

    def halved(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return tpu_attention(module, query * 0.5, *args, **kwargs)

    AttentionInterface.register("survey_halved", halved)
    AttentionMaskInterface.register("survey_halved", tpu_attention_mask)


def _strengthen(model: Any) -> None:
    """Weights as large as training makes them, so that attention moves the outputs (0.02 leaves it nearly uniform)."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if type(module).__name__ in ("Linear", "Conv1D") and weight is not None and weight.dim() == 2:
                fan_in = module.in_features if hasattr(module, "in_features") else weight.shape[0]
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.5 / fan_in**0.5))
            elif type(module).__name__ == "Embedding":
                weight.copy_(torch.randn(weight.shape, generator=generator))
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all():  # never initialised
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def candidate_inputs(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Inputs to try, by the names that the model's forward takes; the first that eager accepts is used."""
    import torch

    names = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()) and "args" in names:
        return
    config = model.config
    generator = torch.Generator().manual_seed(2)
    everything = _text_inputs(model, generator)
    if "decoder_input_ids" in names:
        everything["decoder_input_ids"] = torch.randint(3, 99, (2, 5), generator=generator)
    for source in _vision_configs(config):
        size, channels = getattr(source, "image_size", 32), getattr(source, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
        frames = getattr(source, "num_frames", 0)
        everything["pixel_values"] = torch.randn(2, channels, height, width, generator=generator)
        everything["pixel_values_videos"] = torch.randn(2, frames or 2, channels, height, width, generator=generator)
    patches, grid = _packed_patches(config, generator)
    mels = next((getattr(part, "num_mel_bins", 0) for part in _parts(config) if getattr(part, "num_mel_bins", 0)), 16)
    everything["input_values"] = torch.randn(2, 4000, generator=generator)
    features = torch.randn(2, mels, 80, generator=generator)
    text = ["input_ids", "attention_mask", "decoder_input_ids"]
    for label, wanted, changes in (
        ("text", text, {}),
        ("text", text[1:], {"inputs_embeds": None}),
        ("text and image", [*text, "pixel_values"], {}),
        ("image", ["pixel_values"], {}),
        ("video", ["pixel_values_videos"], {}),
        ("video", [], {"pixel_values": everything.get("pixel_values_videos")}),
        ("audio", ["decoder_input_ids"], {"input_features": features}),
        ("audio", ["decoder_input_ids"], {"input_features": features.transpose(1, 2).contiguous()}),
        ("audio", ["input_values", "decoder_input_ids"], {}),
        ("audio", [], {"input_values": everything["input_values"][:, None]}),
        ("audio", [], {"input_values": features.transpose(1, 2).contiguous()}),
        ("text and audio", text, {"input_features": features}),
        ("audio and mask", [], {"input_features": features, "input_features_mask": _frames_mask(80)}),
        ("text and boxes", text, {"bbox": _boxes(generator)}),
        ("text and boxes", text, {"bbox": _boxes(generator) / 1000}),
        ("packed images", [], {"hidden_states": patches.flatten(1), "grid_thw": grid}),
        ("packed images", [], {"pixel_values": patches.flatten(1), "grid_thw": grid, "merge_sizes": torch.full((2,), 2)}),
        ("packed images", [], {"pixel_values": patches[:, :, 0], "grid_thw": grid}),
        ("text and padded image", text, _padded_patches(patches, grid)),
    ):
        made = {name: everything[name] for name in wanted if name in everything and name in names}
        made |= {name: value for name, value in changes.items() if value is not None and name in names}
        if made and (label != "text" or "input_ids" in made) and set(made) - {"attention_mask", "decoder_input_ids"}:
            yield label, made


def _text_inputs(model: Any, generator: Any) -> dict[str, Any]:
    """Two texts, the first shorter: padded on the left for decoders, on the right for encoders."""
    import torch

    ids = torch.randint(3, 99, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    left = not getattr(model.config, "is_encoder_decoder", False) and model.can_generate()
    padding = slice(0, PAD) if left else slice(LENGTH - PAD, None)
    ids[0, padding] = 0
    mask[0, padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _frames_mask(frames: int) -> Any:
    import torch

    mask = torch.ones(2, frames, dtype=torch.long)
    mask[0, frames - 8 * PAD :] = 0
    return mask


def _boxes(generator: Any) -> Any:
    """A box on the page for each token of `_text_inputs`: left, top, right, bottom, of 1000."""
    import torch

    corners = torch.randint(0, 1000, (2, LENGTH, 2, 2), generator=generator).sort(dim=2).values
    return corners.flatten(2)


def _packed_patches(config: Any, generator: Any) -> tuple[Any, Any]:
    """Patches [n, channels, time, height, width] of two images one after the other, and how many each has [2, 3]."""
    import torch

    source = next((part for part in _parts(config) if getattr(part, "patch_size", None)), config)

    def size(*names: str) -> int:
        value = next((getattr(source, name) for name in names if getattr(source, name, None)), 1)
        return value if isinstance(value, int) else value[0]

    grid = torch.tensor([[1, 4, 6], [1, 4, 4]])
    side, channels = size("patch_size"), size("in_channels", "num_channels", "in_chans")
    shape = (int(grid.prod(1).sum()), 3 if channels == 1 else channels, size("temporal_patch_size", "patch_temporal"), side, side)
    return torch.randn(shape, generator=generator), grid


def _padded_patches(patches: Any, grid: Any) -> dict[str, Any]:
    """The two images of `_packed_patches` beside each other, the smaller one padded."""
    import torch

    counts = grid.prod(1).tolist()
    images = torch.nn.utils.rnn.pad_sequence(patches.flatten(1).split(counts), batch_first=True)
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    return {"pixel_values": images, "pixel_attention_mask": mask.long(), "spatial_shapes": grid[:, 1:]}


def _parts(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _vision_configs(config: Any) -> list[Any]:
    return [part for part in _parts(config) if hasattr(part, "image_size") or hasattr(part, "num_channels")][-1:]


def _forward(model: Any, inputs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Named float outputs of one forward pass, caches and weights of attention left out."""
    import torch

    torch.manual_seed(0)  # for models that draw noise
    with torch.no_grad():
        outputs = model(**inputs)
    found: list[tuple[str, Any]] = []
    _collect("", outputs if isinstance(outputs, dict) else {"output": outputs}, found)
    if not found:
        raise ValueError("no float output to compare")
    return found


def _collect(name: str, value: Any, found: list[tuple[str, Any]]) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            found.append((name, value))
    elif isinstance(value, dict):
        for key, part in value.items():
            if "past_key_values" not in key and "attentions" not in key and "cache" not in key:
                _collect(f"{name}.{key}", part, found)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            _collect(f"{name}.{index}", part, found)


def _difference(got: list[tuple[str, Any]], want: list[tuple[str, Any]], inputs: dict[str, Any]) -> float | None:
    """Largest difference at real tokens, over the largest output where that exceeds 1. None where eager is not finite;
    infinite where shapes differ, or where only eager is finite."""
    import torch

    if [(name, value.shape) for name, value in got] != [(name, value.shape) for name, value in want]:
        return float("inf")
    worst, compared = 0.0, False
    mask = inputs.get("attention_mask")
    for (_, a), (_, b) in zip(got, want, strict=True):
        if mask is not None and a.shape[:2] == mask.shape:
            a, b = a[mask.bool()], b[mask.bool()]
        a, b = a.double(), b.double()
        fine = torch.isfinite(b)
        if not fine.any():
            continue
        compared = True
        if not torch.isfinite(a[fine]).all():
            return float("inf")
        a, b = a[fine], b[fine]
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1)))
    return worst if compared else None


def _compare_tokens(eager: Any, ours: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Three greedy tokens under both, where eager generates at all."""
    import torch

    if not eager.can_generate():
        return {}
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    if getattr(eager.config, "is_encoder_decoder", False):
        options |= {"decoder_start_token_id": 1, "pad_token_id": 0}
    sequences = []
    for model in (eager, ours):
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                made = model.generate(**given, **options)
        except Exception as error:
            if model is ours:
                return {"tokens": False, "tokens_why": _short(error)}
            return {"tokens_why": _short(error)}
        sequences.append(made if isinstance(made, torch.Tensor) else made.sequences)
    return {"tokens": bool(torch.equal(*sequences))}


def _routes(table: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in table.rows:
        detail = f" ({row.detail})" if row.detail else ""
        counts[row.route if row.reason == "kernel" else f"{row.route}: {row.reason}{detail}"] += row.calls + row.traced
    return dict(sorted(counts.items()))


def _short(error: BaseException) -> str:
    import traceback

    text = " ".join(str(error).split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tpu_kernels" in frame.filename]
    where = " in tpu_kernels" if any("survey_models" not in frame.filename for frame in frames) else ""
    return f"{type(error).__name__}{where}: {text[:160]}".replace(str(ROOT), "")


def worker(types: list[str]) -> None:
    """Survey `types` and print one JSON line for each, before it and after it."""
    import jax
    import torch

    torch.set_num_threads(1)
    cache = os.environ.get("SURVEY_JAX_CACHE")
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    for model_type in types:
        print(json.dumps({"begin": model_type}), flush=True)
        print(json.dumps({"row": survey(model_type)}), flush=True)


def run_types(types: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of `types`, each tried in a subprocess that is replaced when it crashes or takes too long over one type."""
    left = list(types)
    while left:
        current, lines = None, 0
        batch = left[:BATCH]
        process = subprocess.Popen(
            [sys.executable, __file__, "worker", *batch], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            bufsize=1,
        )  # fmt: skip
        why = ""
        for line in _lines(process):
            if line is None:
                why = f"no result after {SECONDS_A_TYPE} s"
                process.kill()
                break
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "begin" in message:
                current = message["begin"]
            elif "row" in message:
                lines += 1
                left.remove(message["row"]["type"])
                current = None
                yield message["row"]
        code = process.wait()
        assert process.stdout is not None
        process.stdout.close()
        if current is not None:
            left.remove(current)
            yield {"type": current, "head": model_types()[current], "status": "not run", "why": why or f"exit code {code}"}
        elif not lines:
            raise RuntimeError(f"the survey's worker did nothing for {batch} (exit code {code})")


def _lines(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Lines of a subprocess; None when it is silent for too long."""
    assert process.stdout is not None
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    while True:
        if not selector.select(SECONDS_A_TYPE):
            yield None
            return
        line = process.stdout.readline()
        if not line:
            return
        yield line


def load() -> dict[str, Any]:
    """The checked-in data: versions, and rows by type."""
    if not DATA.exists():
        return {"versions": {}, "rows": {}}
    return json.loads(DATA.read_text())


def save(data: dict[str, Any]) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(data["rows"].items()))
    DATA.write_text(f'{{"versions": {json.dumps(data["versions"])},\n "rows": {{\n{rows}\n }}\n}}\n')


def verdict(row: dict[str, Any]) -> str:
    """What a row says, in one of the words that the page counts."""
    if row["status"] == "refused":
        return "takes no new attention name"
    if row["status"] != "run":
        return "raised" if row["status"] == "raised" else "not tried"
    if row["error"] is None:
        return "not comparable"
    if row["error"] > TOLERANCE or row.get("tokens") is False:
        return "wrong"
    if row["never_called"]:
        return "never calls the interface"
    told = [route for route in row["routes"] if ":" in route]
    if not told:
        return "on kernel"
    return "told fallback" if len(told) == len(row["routes"]) else "on kernel, some calls told fallback"


def page(data: dict[str, Any]) -> str:
    """docs/models.md for the data: totals, then one line for each type that ran, then why the others did not."""
    rows = [row for _, row in sorted(data["rows"].items())]
    totals = Counter(verdict(row) for row in rows)
    lines = ["# Which model types work", "",
             "Generated by `python tools/survey_models.py page` from docs/data/models.json (transformers 5.22.2, tiny random",
             "models in float32, emulated on CPU). Error: largest difference from eager at real tokens, over the largest output",
             "where that exceeds 1. Tokens: three greedy tokens, same as eager's.", "",
             f"{len(rows)} types looked at; {sum(row['status'] in ('run', 'raised', 'refused') for row in rows)} ran under eager.", ""]  # fmt: skip
    lines += ["| outcome | types |", "|---|---|", *(f"| {name} | {count} |" for name, count in sorted(totals.items())), ""]
    lines += ["| type | head | outcome | routes (calls) | error | tokens |", "|---|---|---|---|---|---|"]
    for row in rows:
        if verdict(row) == "not tried":
            continue
        routes = ", ".join(f"{route} ({calls})" for route, calls in row.get("routes", {}).items()) or row.get("why", "")
        error = "" if row.get("error") is None else f"{row['error']:.0e}"
        tokens = {True: "same", False: "differ", None: ""}[row.get("tokens")]
        lines.append(f"| {row['type']} | {row['head']} | {verdict(row)} | {routes.replace('|', '/')} | {error} | {tokens} |")
    lines += ["", "## Not built or not run, with eager's own reason", ""]
    lines += [f"- {row['type']} ({row['head']}): {row['why']}" for row in rows if verdict(row) == "not tried"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--types", default="", help="comma-separated; default: all")
    run.add_argument("--again", action="store_true", help="also the types that have a row")
    commands.add_parser("worker").add_argument("types", nargs="+")
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.command == "worker":
        worker(arguments.types)
    elif arguments.command == "page":
        PAGE.write_text(page(load()))
    else:
        types = arguments.types.split(",") if arguments.types else list(model_types())
        data = load()
        for row in run_types([name for name in types if arguments.again or name not in data["rows"]]):
            data = load()
            data["rows"][row["type"]] = row
            save(data)
            print(time.strftime("%H:%M:%S"), json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
