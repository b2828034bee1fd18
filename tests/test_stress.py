"""Use that wears a process out: names taken and given back, forks, threads, failing kernels, shapes without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

import tpu_kernels
from tpu_kernels import attention, bridge, masks, scaffold

from .models.tiny_models import DECODERS
from .test_attention import Layer, close, tensors

ROOT = Path(__file__).parents[1]


def run_script(folder: Path, code: str, *arguments: str, limit: int = 300) -> str:
    """Standard output of `code`, run as a file in a process of its own, given up after `limit` seconds."""
    script = folder / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_names_are_taken_and_given_back_over_and_over():
    before = [set(table.valid_keys()) for table in (AttentionInterface(), AttentionMaskInterface())]
    for _ in range(300):
        tpu_kernels.register("stress_attention")
        tpu_kernels.register("stress_attention")
        assert AttentionInterface()["stress_attention"] is attention.tpu_attention
        tpu_kernels.unregister("stress_attention")
    assert [set(table.valid_keys()) for table in (AttentionInterface(), AttentionMaskInterface())] == before


# Forking is for processes that have not run a kernel yet: jax has threads afterwards.
IN_CHILDREN = """
import multiprocessing, sys
import torch
import tpu_kernels
from tpu_kernels.attention import tpu_attention

def child(answers):
    q, k, v = (torch.arange(2 * 8 * 16.0).reshape(1, 2, 8, 16).sin() * scale for scale in (1, 2, 3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    got, _ = tpu_attention(torch.nn.Identity(), q, k, v, None)
    answers.put((float((got - want).abs().max()), [row.reason for row in tpu_kernels.explain().rows]))

def main():
    torch.set_num_threads(1)
    tpu_kernels.register()
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.Queue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    error, reasons = answers.get(timeout=200)
    process.join()
    assert process.exitcode == 0 and error < 2e-6 and reasons == ["kernel"], (process.exitcode, error, reasons)
    child(answers)  # and the parent is as good as before
    error, reasons = answers.get(timeout=200)
    assert error < 2e-6 and reasons == ["kernel"]

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_made_after_import_compute(method, tmp_path):
    run_script(tmp_path, IN_CHILDREN, method)


def at_once(functions):
    """Results of `functions`, each in a thread of its own, all started at the same moment."""
    barrier, results = threading.Barrier(len(functions)), [None] * len(functions)

    def work(index, function):
        barrier.wait()
        try:
            results[index] = function()
        except BaseException as error:  # noqa: BLE001 -- a thread would only print it
            results[index] = error

    threads = [threading.Thread(target=work, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    return results


def test_eight_threads_get_the_bits_of_one():
    """Half of them meet a shape for the first time at the same moment; nothing that one computes reaches another."""
    tpu_kernels.register()
    calls = [tensors(q_len, 23, seed=seed) for seed, q_len in enumerate((3, 1, 3, 1, 23, 3, 1, 23))]
    rounds = 5

    def call(inputs):
        return [attention.tpu_attention(Layer(), *inputs, None)[0] for _ in range(rounds)]

    got = at_once([lambda inputs=inputs: call(inputs) for inputs in calls])
    for inputs, results in zip(calls, got, strict=True):
        assert not isinstance(results, BaseException), results
        want, _ = attention.tpu_attention(Layer(), *inputs, None)
        assert all(torch.equal(each, want) for each in results)


def test_eight_threads_generate_the_tokens_of_one():
    """One model; half of the threads have a static cache, and every second one a longer prompt."""
    tpu_kernels.register()
    model = DECODERS["llama"].build("tpu_attention")
    prompts = [torch.arange(3 + row, 9 + row + row % 2)[None] for row in range(8)]

    def generate(ids, row):
        # A cache of its own, since generate() keeps the one that it makes itself on the model.
        cache = StaticCache(config=model.config, max_cache_len=24) if row >= 4 else None
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=4,
                                  min_new_tokens=4, do_sample=False, disable_compile=True)  # fmt: skip

    got = at_once([lambda ids=ids, row=row: generate(ids, row) for row, ids in enumerate(prompts)])
    for row, (ids, tokens) in enumerate(zip(prompts, got, strict=True)):
        assert not isinstance(tokens, BaseException), tokens
        assert torch.equal(tokens, generate(ids, row))


@pytest.fixture
def failing_kernel(tmp_path, monkeypatch, alone):
    """Attention named "tpu_failing", whose kernel raises what the environment variable FAIL says."""

    def install(name):
        folder = scaffold.write_kernel(name, tmp_path)
        code = next(folder.glob("torch-ext/*/attention.py"))
        text = code.read_text()
        line = "    batch, heads, q_len, head_dim = q.shape\n"
        assert text.count(line) == 1
        failing = (
            "    import builtins, os\n    if os.environ.get('FAIL'):\n"
            "        raise getattr(builtins, os.environ['FAIL'])('the words of the kernel itself')\n"
        )
        code.write_text(text.replace(line, failing + line))
        monkeypatch.setenv("TPU_KERNELS_SPECS", str(folder))
        tpu_kernels.register("tpu_failing", kernels=(name,))
        return AttentionInterface()["tpu_failing"]

    yield install
    tpu_kernels.unregister("tpu_failing")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_of_the_kernel_comes_out_of_a_compiled_graph_as_it_is(backend, failing_kernel, monkeypatch):
    attend = failing_kernel(f"failing-{backend.replace('_', '-')}")
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(lambda q, k, v: attend(layer, q, k, v, None)[0] + 1, fullgraph=True, backend=backend)
    inputs = tensors(9, 9)
    with torch.no_grad():
        monkeypatch.setenv("FAIL", "ArithmeticError")
        with pytest.raises(ArithmeticError, match="^the words of the kernel itself"):
            compiled(*inputs)
        monkeypatch.delenv("FAIL")
        close(compiled(*inputs), attention.tpu_attention(layer, *inputs, None)[0] + 1)


def test_an_interrupt_in_the_first_trace_leaves_a_usable_process(failing_kernel, monkeypatch):
    attend = failing_kernel("interrupted-kernel")
    inputs = tensors(9, 9)
    monkeypatch.setenv("FAIL", "KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        attend(Layer(), *inputs, None)
    monkeypatch.delenv("FAIL")
    close(attend(Layer(), *inputs, None)[0], attention.tpu_attention(Layer(), *inputs, None)[0])


# The signal arrives while jax traces or compiles the first kernel of the process, at a moment that the argument chooses.
INTERRUPTED = """
import os, signal, sys, threading, time
import torch
import tpu_kernels
from tpu_kernels import ops
from tpu_kernels.attention import tpu_attention

torch.set_num_threads(1)
tpu_kernels.register()
q = torch.arange(2 * 40 * 16.0).reshape(1, 2, 40, 16).sin()

def attend():
    return tpu_attention(torch.nn.Identity(), q, q, q, None)[0]

def interrupt(started, delay):
    started.wait()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)

started, build = threading.Event(), ops._emulated

def loading(spec, function):
    run = build(spec, function)  # the kernel is imported; its first run traces and compiles
    def first(*arguments):
        started.set()
        return run(*arguments)
    return first

ops._emulated = loading
threading.Thread(target=interrupt, args=(started, float(sys.argv[1])), daemon=True).start()
begin = time.monotonic()
try:
    attend()
except KeyboardInterrupt:
    print("interrupted after", round(time.monotonic() - begin, 1))
want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
got = attend()
assert (got - want).abs().max() < 2e-6, (got - want).abs().max()
model = torch.compile(lambda x: tpu_attention(torch.nn.Identity(), x, x, x, None)[0], backend="aot_eager", fullgraph=True)
assert torch.equal(model(q), got)
print("usable")
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["0", "0.05", "0.2", "0.5"])
def test_ctrl_c_in_the_first_compile_leaves_a_usable_process(delay, tmp_path):
    told = run_script(tmp_path, INTERRUPTED, delay)
    print(told)
    assert told.startswith("interrupted after") and told.endswith("usable\n")


# The kernel is a stub: what is measured is what this package and torch keep of a shape.
MANY_SHAPES = """
import gc, json, resource, tracemalloc
from unittest import mock
import torch
import tpu_kernels
from tpu_kernels import attention, ops

torch.set_num_threads(1)
tpu_kernels.register()
module, ran = torch.nn.Identity(), 0

def stub(spec, function):
    def run(q, *_):
        global ran
        ran += 1
        return torch.empty_like(q)
    return run

def calls(first, last):
    for length in range(first, last):
        q, k = torch.empty(1, 1, 1 + length % 97, 8), torch.empty(1, 1, length, 8)
        attention.tpu_attention(module, q, k, k, None)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]

with mock.patch.object(ops, "_emulated", stub), torch.no_grad():
    calls(1, 200)
    tracemalloc.start()
    half, whole = calls(200, 200 + COUNT), calls(200 + COUNT, 200 + 2 * COUNT)
print(json.dumps({"plans": len(attention._plans), "half": half, "whole": whole, "ran": ran,
                  "shapes": len(tpu_kernels.explain().shapes)}))
"""


@pytest.mark.slow
def test_memory_over_10000_shapes(tmp_path):
    told = json.loads(run_script(tmp_path, MANY_SHAPES.replace("COUNT", "5000")))
    print(told)
    assert told["ran"] >= 10_199 and told["shapes"] >= 10_000
    assert told["plans"] <= attention._MOST_PLANS
    # What explain() lists of a shape stays until reset(); plans do not add up.
    assert told["whole"] - told["half"] < 5000 * 500


# A small kernel, or the packaged one: what is measured is what the emulation keeps of a compiled program.
MANY_PROGRAMS = """
import gc, json, sys
from unittest import mock
import torch
import tpu_kernels
from tpu_kernels import attention, bridge, ops

COUNT, SMALL = int(sys.argv[1]), sys.argv[2] == "small"
torch.set_num_threads(1)
tpu_kernels.register()
module = torch.nn.Identity()

def small(q, k, v, mask, sinks, scale, softcap, causal, has_validity, precision, block_q, block_kv, vmem_bytes):
    return q * scale + v.sum(2, keepdims=True)

def resident():
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

marks, most = [], 0
build = (lambda spec, function: bridge.emulated(small)) if SMALL else ops._emulated
with mock.patch.object(ops, "_emulated", build), torch.no_grad():
    for number in range(COUNT):
        length = 70 + number // 97
        q, k = torch.ones(1, 1, 70 + number % 97, 8), torch.ones(1, 1, length, 8)
        got, _ = attention.tpu_attention(module, q, k, k, None, is_causal=False)
        want = q.transpose(1, 2) * 8**-0.5 + length if SMALL else torch.ones_like(q).transpose(1, 2)
        assert torch.allclose(got, want), (number, got, want)
        if number % (COUNT // 20) == COUNT // 20 - 1:
            marks.append(round(resident()))
            most = max(most, bridge.mappings())
print(json.dumps({"MiB": marks, "most mappings": most, "shapes": len(tpu_kernels.explain().shapes)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "count"), [("small", 10_000), ("range-attention", 400)])
def test_programs_of_many_shapes_are_freed(kernel, count, tmp_path):
    told = json.loads(run_script(tmp_path, MANY_PROGRAMS, str(count), kernel, limit=7200))
    print(told)
    assert told["shapes"] == count and told["most mappings"] < 40_000
    marks = told["MiB"]
    # The first tenth loads libraries and fills the room that there is; from then on memory is that of 256 programs at most.
    assert max(marks[10:]) < 1.15 * max(marks[2:10])


@pytest.mark.thorough
def test_programs_past_the_bound_are_freed_and_made_again(monkeypatch):
    traced = []
    monkeypatch.setattr(bridge, "_programs", bridge._Programs())
    monkeypatch.setattr(bridge, "_MOST_PROGRAMS", 3)

    def twice(q, factor):
        traced.append(q.shape)
        return q * factor

    run = bridge.emulated(twice, ("factor",))
    for sizes, want in (((1, 2, 1, 2), 2), ((3,), 3), ((1,), 4), ((1, 3), 5)):
        for size in sizes:
            assert torch.equal(run(torch.ones(size), 2.0), torch.full((size,), 2.0))
        assert len(traced) == want


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(attention, "_plans", {})
    monkeypatch.setattr(attention, "_MOST_PLANS", 4)
    ends = torch.tensor([[3]], dtype=torch.int32)
    for kv_len in (3, 4, 5, 6, 7, 8, 3):
        q, k, v = (x[:1] for x in tensors(1, kv_len))
        mask = masks.encode_ranges(torch.zeros_like(ends), ends, None, kv_len)
        got, _ = attention.tpu_attention(Layer(), q, k, v, mask)
        assert 1 <= len(attention._plans) <= 4
        close(got, torch.nn.functional.scaled_dot_product_attention(
            q, k[:, :, :3], v[:, :, :3], enable_gqa=True).transpose(1, 2))  # fmt: skip
