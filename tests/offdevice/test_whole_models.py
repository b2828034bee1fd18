"""Published attention geometries, whole models: through torch.compile(backend="tpu") by torch_tpu, compiled by libtpu.

Layers are few and what is not attention is narrow; heads, head sizes, windows, sinks and caches are the real ones.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tpu_kernels.offdevice import module_text
from tpu_kernels.offdevice.aot import Compiled
from tpu_kernels.offdevice.emit import Emitted, Emitter, ModuleJob

PROMPT, CACHE = 656, 1000  # lengths that no other dimension of these models has
_NARROW = {"vocab_size": 320, "intermediate_size": 448, "num_hidden_layers": 2}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Attention of a published model: K heads, query heads, head size of K, and how many attention calls a pass makes."""

    config: dict[str, Any]
    q_heads: int
    kv_heads: int
    head_dim: int
    prefill_calls: int = 2
    decode_calls: int = 2
    prefill_length: int = PROMPT


GEOMETRIES = {
    "Llama-3-8B": Geometry(
        {
            **_NARROW, "model_type": "llama", "hidden_size": 512,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        }, 32, 8, 128,
    ),
    "Qwen3-0.6B": Geometry(
        {
            **_NARROW, "model_type": "qwen3", "hidden_size": 512,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        }, 16, 8, 128,
    ),
    "Gemma-3-4B": Geometry(
        {
            **_NARROW, "model_type": "gemma3_text", "hidden_size": 512, "sliding_window": 512,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "layer_types": ["sliding_attention", "full_attention"],
        }, 8, 4, 256,
    ),
    "gpt-oss-20b": Geometry(
        {
            **_NARROW, "model_type": "gpt_oss", "hidden_size": 512, "sliding_window": 128,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        }, 64, 8, 64,
    ),
    "Mistral-7B": Geometry(
        {
            **_NARROW, "model_type": "mistral", "hidden_size": 512, "sliding_window": 256,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        }, 32, 8, 128,
    ),
    "Whisper-large": Geometry(
        {
            "model_type": "whisper", "vocab_size": 320, "d_model": 1280, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 448,
            "decoder_ffn_dim": 448, "max_target_positions": 448, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, "decoder_start_token_id": 1,
        }, 20, 20, 64, prefill_calls=3, prefill_length=1500,
    ),
    "BERT-base": Geometry(
        {**_NARROW, "model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 1024},
        12, 12, 64, decode_calls=0,
    ),
    "Qwen2.5-VL-7B (text)": Geometry(
        {
            "model_type": "qwen2_5_vl",
            "text_config": {
                **_NARROW, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {
                "depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 3584,
            },
        }, 28, 4, 128,
    ),
    "DeepSeek-V3 (MLA)": Geometry(
        {
            **_NARROW, "model_type": "deepseek_v3", "hidden_size": 512, "num_attention_heads": 128,
            "num_key_value_heads": 128, "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 2, "n_routed_experts": 8,
            "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        }, 128, 128, 192,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    phase: str
    attention: str
    target: str
    emitted: Emitted
    compiled: Compiled | None
    square: dict[module_text.TensorType, int]
    expanded: list[str]

    def __str__(self) -> str:
        start = f"{self.model:21} {self.phase:8} {self.attention:14} {self.target:4}"
        if not self.emitted.ok:
            return f"{start} FAILS {self.emitted.stage}: {self.emitted.error.splitlines()[0][:80]}"
        assert self.compiled is not None
        if not self.compiled.ok:
            return f"{start} FAILS {self.compiled.stage}: {self.compiled.error.splitlines()[0][:80]}"
        widest = max(self.square, key=lambda each: math.prod(each.shape), default=None)
        return (
            f"{start} {self.emitted.graphs:6} {self.emitted.graph_breaks:6} {len(self.emitted.kernels):7} "
            f"{widest or '-'!s:>22} {len(self.expanded):8} {self.compiled.temp_bytes / 2**20:8.1f} "
            f"{self.compiled.seconds['compile']:7.1f}"
        )


def rows(target: str, attention: str, folder: Path) -> list[Row]:
    """Every model and phase for one target, in one worker process."""
    made = []
    with Emitter(target, timeout=200) as emitter:
        for name, geometry in GEOMETRIES.items():
            for phase, calls in (("prefill", geometry.prefill_calls), ("decode", geometry.decode_calls)):
                if not calls:
                    continue
                place = folder / f"{len(made)}"
                place.mkdir(parents=True)
                parameters = {
                    "config": geometry.config, "attention": attention, "phase": phase,
                    "batch": 2, "prompt": PROMPT if phase == "prefill" else 9, "cache": CACHE if phase == "decode" else 0,
                }  # fmt: skip
                if "Whisper" in name and phase == "decode":
                    parameters["cache"] = 448
                emitted = emitter.run(ModuleJob("tpu_kernels.offdevice.models:program", parameters), place)
                compiled, square, expanded = None, {}, []
                if emitted.ok:
                    text = "\n".join(path.read_text() for path in emitted.modules)
                    length = geometry.prefill_length
                    square = module_text.score_tensors(text, length, length) if phase == "prefill" else {}
                    lengths = {length} if phase == "prefill" else {CACHE, geometry.config.get("sliding_window", CACHE)}
                    expanded = [
                        found
                        for kv_len in sorted(lengths)
                        for found in module_text.expanded_kv(
                            text,
                            q_heads=geometry.q_heads,
                            kv_heads=geometry.kv_heads,
                            kv_len=kv_len,
                            head_dim=geometry.head_dim,
                        )
                    ]
                    compiled = emitter.compile(emitted.modules[0])
                made.append(Row(name, phase, attention, target, emitted, compiled, square, expanded))
    return made


@pytest.mark.slow
def test_whole_models(capsys, tmp_path):
    wanted = [("v5e", "tpu_attention"), ("v6e", "tpu_attention"), ("v6e", "sdpa")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(lambda each: rows(*each, tmp_path / "-".join(each)), wanted))
    with capsys.disabled():
        print(
            "\nwhole models through torch.compile(backend='tpu', fullgraph=True), compiled by libtpu\n"
            f"{'model':21} {'phase':8} {'attention':14} {'for':4} {'graphs':>6} {'breaks':>6} {'kernels':>7} "
            f"{'largest [.., S, S]':>22} {'K/V rep.':>8} {'temp MiB':>8} {'compile':>7}"
        )
        for group in zip(*tables, strict=True):
            print(*group, sep="\n")
    ours = [row for table in tables[:2] for row in table]
    for row in ours:
        assert row.emitted.ok, f"{row}\n{row.emitted.error}"
        assert row.compiled is not None and row.compiled.ok, f"{row}\n{row.compiled and row.compiled.error}"
        assert (row.emitted.graphs, row.emitted.graph_breaks) == (1, 0), row
        geometry = GEOMETRIES[row.model]
        calls = geometry.prefill_calls if row.phase == "prefill" else geometry.decode_calls
        assert len(row.emitted.kernels) == calls, f"{row}: {row.emitted.kernels}"
        assert not row.square, f"{row}: {row.square}"
        assert not row.expanded, f"{row}: {row.expanded}"
    theirs = {(row.model, row.phase): row for row in tables[2]}
    llama = theirs["Llama-3-8B", "prefill"]
    assert llama.square and llama.expanded, "the search no longer finds what sdpa materialises"
    for windowed in ("Mistral-7B", "Gemma-3-4B"):
        assert len(theirs[windowed, "decode"].expanded) == 4, "K and V of each layer, in caches of a window or of all slots"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_a_long_prefill_takes_no_memory_for_attention(target, capsys, tmp_path):
    """Temporary HBM of one attention call at 8192 tokens, its mask made from a padding mask in the same program."""
    length, temp = 8192, {}
    builder = f"{Path(__file__).with_name('torch_programs.py')}:padded_attention"
    with Emitter(target, timeout=400) as emitter:
        for implementation in ("sdpa", "tpu_attention"):
            place = tmp_path / implementation
            place.mkdir()
            parameters = {
                "implementation": implementation, "batch": 1, "q_heads": 32, "kv_heads": 8, "length": length,
                "head_dim": 128,
            }  # fmt: skip
            emitted = emitter.run(ModuleJob(builder, parameters), place)
            assert emitted.ok, emitted.error
            text = emitted.modules[0].read_text()
            assert bool(module_text.score_tensors(text, length, length)) is (implementation == "sdpa")
            compiled = emitter.compile(emitted.modules[0])
            assert compiled.ok, compiled.error
            temp[implementation] = compiled.temp_bytes / 2**20
    with capsys.disabled():
        print(
            f"\ntemporary HBM of one attention call, 32/8 heads of 128, {length} tokens, on {target}: "
            f"sdpa {temp['sdpa']:.1f} MiB, tpu_attention {temp['tpu_attention']:.1f} MiB"
        )
    assert temp["sdpa"] >= 128
    assert temp["tpu_attention"] < 1  # the bounds of blocks: some KiB
