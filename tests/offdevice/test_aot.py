"""Compilation for TPU generations in worker processes: results, failure stages, crashes and time limits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tpu_kernels.offdevice.aot import Array, Compiler, FunctionJob, ModuleJob, compile_all
from tpu_kernels.offdevice.targets import TARGETS, UnknownTargetError, target, target_of_device_kind

PEERS = Path(__file__).with_name("peers.py")


def job(name: str, *shapes: tuple[int, ...] | None, to: str = "v6e", dtype: str = "bfloat16", **static) -> FunctionJob:
    arguments = tuple(None if shape is None else Array(dtype, shape) for shape in shapes)
    return FunctionJob(f"{PEERS}:{name}", arguments, to, static)


@pytest.fixture(scope="module")
def compiler():
    with Compiler(timeout=60) as made:
        yield made


def test_peak_of_each_generation_is_the_published_one():
    published = {"v4": 275e12 / 2, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12 / 2}
    for name, flops in published.items():
        assert TARGETS[name].flops_per_second == pytest.approx(flops, rel=0.005)


@pytest.mark.parametrize("name", ["v5E", " ironwood", "7x"])
def test_target_names_are_forgiving(name):
    assert target(name).name in TARGETS


def test_unknown_target_names_the_supported_ones(compiler):
    with pytest.raises(UnknownTargetError, match="'v3'.*v4, v5e, v5p, v6e, tpu7x"):
        compiler.run(job("double", (8, 128), to="v3"))
    assert target_of_device_kind("TPU v6 lite") is TARGETS["v6e"]
    assert target_of_device_kind("TPU v3") is None


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_compiles_for_every_generation(compiler, name):
    result = compiler.run(job("double", (256, 256), to=name))
    assert result.ok, result.error
    assert result.argument_bytes == result.output_bytes == 256 * 256 * 2
    # Its input and its output; on tpu7x XLA itself keeps one of them in VMEM for it.
    assert result.vmem_bytes >= 256 * 256 * 2


def test_memory_of_a_peer_kernel(compiler):
    length = 2048
    result = compiler.run(job("splash_gqa", (1, 4, length, 128), *[(1, 2, length, 128)] * 2, block=512))
    assert result.ok, result.error
    assert result.argument_bytes == 8 * length * 128 * 2
    assert 2**20 < result.vmem_bytes < TARGETS["v6e"].vmem_bytes
    assert set(result.seconds) == {"trace", "lower", "compile"}


def test_a_kernel_sees_the_chip_it_is_traced_for(compiler, tmp_path):
    for name, generation in (("v5e", 5), ("tpu7x", 7)):
        hlo = tmp_path / name
        given = job("times_generation", (8, 128), to=name)
        result = compiler.run(FunctionJob(given.function, given.arguments, name, keep_hlo=hlo))
        assert result.ok, result.error
        assert f"constant({generation})" in hlo.read_text()


def test_absent_arguments_and_static_arguments(compiler):
    result = compiler.run(job("optional_second", (8, 128), None, (8, 128), scale=2.0))
    assert result.ok, result.error


@pytest.mark.parametrize(
    ("name", "shape", "stage", "text"),
    [
        ("absent", (8, 128), "import", "AttributeError"),
        ("refuses_to_trace", (8, 7), "trace", "ValueError: head_dim 7 is odd"),
        ("lowers_nowhere", (128, 128), "lower", "cholesky"),
        ("needs_too_much_vmem", (512, 512), "compile", "RESOURCE_EXHAUSTED"),
        ("dies", (8, 128), "trace", "SIGABRT"),
    ],
)
def test_failure_names_its_stage_and_the_next_job_runs(compiler, name, shape, stage, text):
    result = compiler.run(job(name, shape, dtype="float32"))
    assert not result.ok
    assert result.stage == stage
    assert text in result.error
    assert compiler.run(job("double", (8, 128))).ok


def test_what_a_dying_worker_wrote_is_in_the_error(compiler):
    assert "the compiler fell over" in compiler.run(job("dies", (8, 128))).error


def test_a_job_over_its_time_limit_is_ended(compiler):
    assert compiler.run(job("double", (8, 128))).ok  # a worker that has started: its start is not to be timed
    result = compiler.run(job("never_ends", (8, 128)), timeout=3)
    assert (result.ok, result.stage) == (False, "trace")
    assert "longer than 3 s" in result.error
    assert compiler.run(job("double", (8, 128))).ok


def test_two_at_a_time_keep_the_order_of_the_jobs():
    shapes = [(8, 128 * width) for width in range(1, 7)]
    jobs = [job("double", shape) for shape in shapes]
    jobs.insert(3, job("dies", (8, 128)))
    results = list(compile_all(jobs, workers=2, timeout=60))
    assert [result.ok for result in results] == [True] * 3 + [False] + [True] * 3
    sizes = [result.argument_bytes for result in results if result.ok]
    assert sizes == [2 * rows * columns for rows, columns in shapes]


def test_two_compilers_in_two_threads():
    results = {}

    def work(name: str) -> None:
        with Compiler(timeout=60) as own:
            results[name] = own.run(job("double", (64, 128), to=name))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("v5e", "v6e")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[name].ok for name in ("v5e", "v6e"))


def test_stablehlo_text_compiles_and_bad_text_is_refused(compiler, tmp_path):
    good, bad = tmp_path / "good.mlir", tmp_path / "bad.mlir"
    good.write_text(
        "module { func.func @main(%a: tensor<8x128xf32>) -> tensor<8x128xf32> {\n"
        "  %b = stablehlo.add %a, %a : tensor<8x128xf32>\n  return %b : tensor<8x128xf32>\n} }\n"
    )
    bad.write_text("module { nonsense }")
    result = compiler.run(ModuleJob(good, "v5p"))
    assert result.ok, result.error
    assert result.argument_bytes == 8 * 128 * 4
    refused = compiler.run(ModuleJob(bad, "v5p"))
    assert (refused.ok, refused.stage) == (False, "compile")
