"""The static schedule: the interpreter on programs small enough to count by hand, and real programs whose work is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpu_kernels.offdevice.aot import Array, FunctionJob
from tpu_kernels.offdevice.llo import DmaModel, Program, UnsupportedProgramError
from tpu_kernels.offdevice.schedule import entry_instructions, smem_words
from tpu_kernels.offdevice.targets import TARGETS

PEERS = Path(__file__).with_name("peers.py")
HEAD = "= control target key start\nLB: loop body\nPF: predicated region fallthrough\n= control target key end\n\n"
MODEL = DmaModel(bytes_per_cycle=16.0, latency=100.0, granule=32)


def program(*bundles: str, delay: int = 1, utilisation: str = "") -> Program:
    """Bundles written as "TAG| operations"."""
    lines = []
    for address, bundle in enumerate(bundles):
        tag, _, operations = bundle.rpartition("|")
        lines.append(f"{address:#6x} {tag or '  '}: > {{ {operations} }}")
    return Program(HEAD + "\n".join(lines), delay, utilisation)


def loop(turns: int, *body: str, delay: int = 1) -> list[str]:
    """A loop of `turns` turns: a header of one bundle, the body, the branch and its delay slot."""
    start = 1
    return [
        "%s0_s0 = smov.u32 0",
        "LB| %s1_s1 = sphi %s0_s0, %s2_s2  ;;  %s2_s2 = sadd.s32 1, %s1_s1",
        *body,
        f"%p0_p0 = scmp.ge.s32.totalorder %s2_s2, {turns}",
        f"%9 = sbr.rel (!%p0_p0) target bundleno = {start} ({start:#x}), region = 1",
        *[""] * delay,
    ]


def test_a_loop_costs_its_turns():
    run = program(*loop(5)).run(MODEL)
    assert run.cycles == 1 + 5 * 4
    assert run.stall_cycles == 0
    assert [(path.start, path.cycles, path.passes) for path in run.paths] == [(1, 4, 5), (0, 1, 1)]


def test_delay_slots_issue_before_the_branch_is_taken():
    run = program(*loop(3, delay=4), delay=4).run(MODEL)
    assert run.cycles == 1 + 3 * 7


def test_a_region_is_skipped_when_a_prefetched_scalar_says_so():
    """Turn i runs the region of three bundles when word i of operand 0 is set."""
    bundles = [
        "%s90_s0 = inlined_call_operand.vmem [shape: s32[4], index: 0, kind: input, shape index: {}]",
        "%s91_s1 = sshll.u32 %s90_s0, 4  ;;  %s92_s2 = smov.u32 [#allocation5]",
        "%7 = dma.vmem_to_smem /*vmem=*/%s91_s1, /*size_in_granules=*/16, /*smem=*/%s92_s2, "
        "/*dst_syncflagno=*/[#allocation1]",
        "%8 = dma.done.wait [#allocation1], 16  ;;  %s0_s0 = smov.u32 0",
        "LB| %s1_s1 = sphi %s0_s0, %s2_s2  ;;  %s2_s2 = sadd.s32 1, %s1_s1",
        "%s3_s3 = sld [smem:[#allocation5 + %s1_s1]]",
        "%p1_p1 = scmp.eq.s32.totalorder %s3_s3, 0  ;;  %p0_p0 = scmp.ge.s32.totalorder %s2_s2, 4",
        "%5 = sbr.rel (%p1_p1) target bundleno = 12 (0xc), region = 2",
        "",
        "%v1_v0 = vadd.f32 %v0_v0, %v0_v0",
        "",
        "",
        "PF| %9 = sbr.rel (!%p0_p0) target bundleno = 4 (0x4), region = 1",
        "",
    ]
    made = program(*bundles)
    for words, region in (((1, 0, 1, 1), 3), ((0, 0, 0, 0), 0)):
        run = made.run(MODEL, {0: [*words, *[0] * 124]})
        assert run.cycles == 4 + 4 * (5 + 2) + region * 3
        assert dict(run.moved_bytes) == {"vmem_to_smem": 512}
    with pytest.raises(UnsupportedProgramError, match=r"depends on a value that is not known.*bundles 0x4 to 0x9"):
        made.run(MODEL)


def test_dmas_queue_on_one_channel_and_are_waited_for():
    start = (
        "%{0} = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s1, /*size_in_granules=*/100, /*vmem=*/%s2_s2, "
        "/*dst_syncflagno=*/[#allocation{0}]"
    )
    run = program(
        "%s1_s1 = smov.u32 [#allocation7]  ;;  %s2_s2 = smov.u32 [#allocation8]",
        start.format(3),
        start.format(4),
        "%5 = dma.done.wait [#allocation4], 100",
        "%6 = dma.done.wait [#allocation3], 100  ;;  %7 = vsyncadd [#allocation3], 4294967196",
    ).run(MODEL)
    # Both are issued at once: 3200 bytes each at 16 a cycle, the second behind the first, and the latency.
    assert run.stall_cycles == pytest.approx(1 + 200 + 200 + 100 - 3)
    assert run.cycles == 5
    assert run.hbm_bytes == 2 * 3200


def test_arithmetic_is_of_32_bits():
    """Each result decides a branch over four bundles; a wrong one changes the count."""
    for operation, expected in (
        ("sadd.s32 2147483647, %s0_s0", -(2**31)),
        ("smul.u32 65536, %s1_s1", 0),
        ("smulhi.u32 %s2_s2, %s1_s1", 65535),
        ("sshll.u32 %s0_s0, 31", -(2**31)),
        ("sshra.s32 %s2_s2, 1", -1),
        ("sshrl.u32 %s2_s2, 28", 15),
        ("sand.u32 24, %s2_s2", 24),
        ("scalar_select /*predicate=*/%p1_p1, /*on_true=*/7, /*on_false=*/9", 7),
        ("smov.u32 (%p1_p1, %s0_s0), 5", 5),
        ("smov.u32 (!%p1_p1, %s0_s0), 5", 1),
    ):
        run = program(
            "%s0_s0 = smov.u32 1  ;;  %s1_s1 = smov.u32 65536  ;;  %s2_s2 = smov.u32 4294967295",
            "%p1_p1 = scmp.lt.u32.totalorder %s0_s0, %s2_s2",
            f"%s3_s3 = {operation}",
            f"%p0_p0 = scmp.eq.s32.totalorder %s3_s3, {expected}",
            "%9 = sbr.rel (%p0_p0) target bundleno = 10 (0xa), region = 1",
            *[""] * 6,
        ).run(MODEL)
        assert run.cycles == 7, operation


@pytest.mark.parametrize(("dividend", "quotient", "remainder"), [(96, 13, 5), (2**32 - 1, 613566756, 3)])
def test_a_division_hands_back_its_quotient_and_then_its_remainder(dividend, quotient, remainder):
    """No vector unit hands them back: `popped` says nothing about them."""
    for register, expected in (("%s2_s2", quotient), ("%s3_s3", remainder), ("%s4_s4", quotient)):
        run = program(
            f"%s0_s0 = smov.u32 {dividend}  ;;  %p1_p1 = smov.u32 0  ;;  %s4_s4 = smov.u32 {quotient}",
            "%5 = sdivrem.u32 (!%p1_p1), %s0_s0, 7 /* kDivAndRem */  ;;  %6 = sdivrem.u32 (%p1_p1), %s0_s0, 5",
            "%s2_s2 = spop.drf (!%p1_p1), %5  ;;  %s4_s4 = spop.drf (%p1_p1), %6",
            "%s3_s3 = spop.drf (!%p1_p1), %5  ;;  %s5_s5 = spop.drf (%p1_p1), %6",
            f"%p0_p0 = scmp.eq.s32.totalorder {register}, {expected}",
            "%9 = sbr.rel (%p0_p0) target bundleno = 10 (0xa), region = 1",
            *[""] * 5,
        ).run(MODEL, popped=0)
        assert run.cycles == 8, register


def test_unknown_values_do_no_harm_where_nothing_depends_on_them():
    made = program("%s1_s1 = spop %v3_v3", "%s2_s2 = snewthing.u32 %s1_s1, 3", "%s3_s3 = sadd.s32 %s2_s2, 1", "")
    assert made.run(MODEL).cycles == 4
    assert dict(made.unknown_opcodes) == {"snewthing.u32": 1}


def test_what_the_vector_unit_hands_back_is_not_known_unless_it_is_stated():
    branch = ["%p1_p1 = scmp.gt.f32.partialorder %s1_s1, 0.0"]
    branch += ["%9 = sbr.rel (!%p1_p1) target bundleno = 6 (0x6), region = 1"]
    made = program("%s1_s1 = spop %v3_v3", *branch, "", "%v1_v0 = vadd.f32 %v0_v0, %v0_v0", "", "")
    with pytest.raises(UnsupportedProgramError, match="not known"):
        made.run(MODEL)
    assert (made.run(MODEL, popped=0).cycles, made.run(MODEL, popped=1).cycles) == (5, 7)


def test_a_number_that_is_no_integer_is_not_known():
    start = ["%s1_s1 = smov.f32 1.442695", "%s2_s2 = scalar_select /*predicate=*/1, /*on_true=*/-2.5e+07, /*on_false=*/inf"]
    assert program(*start, "").run(MODEL).cycles == 3
    branch = ["%p1_p1 = scmp.eq.s32.totalorder %s2_s2, 0", "%9 = sbr.rel (%p1_p1) target bundleno = 6 (0x6), region = 1"]
    with pytest.raises(UnsupportedProgramError, match="not known"):
        program(*start, *branch, "", "", "").run(MODEL)


def test_a_predicate_that_is_not_known_makes_its_results_unknown():
    """Not a word of memory, nor a register, is taken for known then; others are."""
    start = [
        "%s1_s1 = spop %v3_v3  ;;  %s2_s2 = smov.u32 5",
        "%p1_p1 = scmp.eq.s32.totalorder %s1_s1, 0  ;;  %1 = sst [smem:[#allocation2]] %s2_s2",
        "%2 = sst [smem:[#allocation3]] %s2_s2",
        "%3 = sst [smem:[#allocation2]] (%p1_p1), %s1_s1  ;;  %s2_s2 = smov.u32 (%p1_p1), 6",
    ]
    branch = ["%p2_p2 = scmp.eq.s32.totalorder %s9_s9, 5", "%9 = sbr.rel (%p2_p2) target bundleno = 9 (0x9), region = 1"]
    for source, known in (
        ("sld [smem:[#allocation3]]", True),
        ("sld [smem:[#allocation2]]", False),
        ("smov.u32 %s2_s2", False),
    ):
        made = program(*start, f"%s9_s9 = {source}", *branch, "", "", "")
        if known:
            assert made.run(MODEL).cycles == 9
        else:
            with pytest.raises(UnsupportedProgramError, match="not known"):
                made.run(MODEL)


@pytest.mark.parametrize(
    ("bundles", "text"),
    [
        (["%s1_s1 = snewthing.u32 1", "%p1_p1 = scmp.eq.s32.totalorder %s1_s1, 0", *loop(2)[-2:]], "is not there|not known"),
        (["%5 = dma.done.wait [#allocation4], 100"], "a DMA that it did not start"),
        (["%5 = newcontrol.op 3"], "opcode newcontrol.op is not known"),
        (["%5 = sdivrem.u32 9, 7", "%s2_s2 = spop.drf %5"], "1 results of the division %5 are read"),
        (["%s2_s2 = spop.drf %5"], "a result of no division"),
        (["%5 = vwait.ge [#allocation4], 1"], "vwait.ge waits"),
        (["%5 = dma.teleport %s1, 3"], "a DMA of unknown form"),
        (["%5 = sbr.ind %s1_s1"], "branches in an unknown way"),
        (["%s1_s1 = sphi %s2_s2, %s3_s3"], "is no loop header"),
        (["%9 = sbr.rel target bundleno = 77 (0x4d), region = 1", "", ""], "which is not there"),
        (["%9 = sbr.rel target bundleno = 3 (0x3), region = 1", "", "", "PF| "], None),
    ],
)
def test_what_is_not_understood_is_refused(bundles, text):
    if text is None:  # understood: the control of this test
        assert program(*bundles).run(MODEL).cycles == 3
        return
    with pytest.raises(UnsupportedProgramError, match=text):
        program(*bundles).run(MODEL)


def test_a_dump_of_another_generation_is_refused():
    bundles = ["", "%9 = sbr.rel target bundleno = 4 (0x4), region = 1", "", " /* Start region 3 */", "", ""]
    assert program(*bundles, delay=1).run(MODEL).cycles == 5
    with pytest.raises(UnsupportedProgramError, match="other than 3 delay slots"):
        program(*bundles, delay=3)


def test_text_that_is_no_dump_is_refused():
    with pytest.raises(UnsupportedProgramError, match="control target key"):
        Program("   0   :  { %2 = sfence }", 4)
    with pytest.raises(UnsupportedProgramError, match="bundle 0x1 is not where it should be"):
        Program(HEAD + "   0   :  { %2 = sfence }\n 0x2   :  { %2 = sfence }", 4)
    table = "== CAPACITY:\nMATMUL, SALU\n  2   2\n== UTILIZATION:\n0 1\n"
    with pytest.raises(UnsupportedProgramError, match="1 rows for 2 bundles"):
        program("", "", utilisation=table)


def test_a_program_without_end_is_given_up():
    with pytest.raises(UnsupportedProgramError, match="took longer than 0 s"):
        program("%9 = sbr.rel target bundleno = 0 (0x0), region = 1", "").run(MODEL, seconds=0.2)


def test_units_are_shares_of_the_issued_slots():
    table = "== CAPACITY:\nMATMUL, SALU\n  2   4\n== UTILIZATION:\n" + "0 2\n" * 4 + "2 0\n"
    run = program(*loop(3), utilisation=table).run(MODEL)
    assert run.units["SALU"] == pytest.approx((1 + 3 * 3) * 2 / (4 * 13))
    assert run.units["MATMUL"] == pytest.approx(3 * 2 / (2 * 13))


def test_integer_arrays_are_laid_out_as_xla_tiles_them():
    eight = np.arange(64, dtype=np.int8).reshape(1, 8, 8)
    words = smem_words(eight, "2,1,0:T(8,128)(4,1)S(1)")
    # Four rows share a word; a row of words is 128 wide.
    assert len(words) == 256
    assert words[1] == int.from_bytes(bytes([1, 9, 17, 25]), "little")
    assert words[128] == int.from_bytes(bytes([32, 40, 48, 56]), "little")
    flat = smem_words((np.arange(300) % 100).astype(np.int8), "0:T(512)(128)(4,1)")
    assert len(flat) == 128
    assert flat[3] == int.from_bytes(bytes([3, 31, 59, 0]), "little")
    assert smem_words(np.array([5, -1], np.int32), "0:T(128)S(1)")[:3] == [5, -1, 0]
    assert smem_words(np.int32(7), ":T(128)S(6)")[0] == 7


def test_instructions_of_an_optimised_module():
    hlo = (
        "HloModule m\n\nENTRY %main (a: bf16[8,128]) -> bf16[8,128] {\n"
        "  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)\n"
        "  %copy-start = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128]{1,0}, u32[]{:S(2)}) copy-start(%a)\n"
        "  %copy-done = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)\n"
        '  %k.1 = bf16[8,128]{1,0} custom-call(%copy-done, /*index=1*/%a), custom_call_target="tpu_custom_call", x={\n'
        '"block": 1\n}}, backend_config={}\n'
        "  ROOT %fusion = bf16[8,128]{1,0} fusion(%k.1), kind=kLoop, calls=%f\n}\n"
    )
    found = {each.name: each for each in entry_instructions(hlo)}
    assert [name for name, each in found.items() if not each.free] == ["k.1", "fusion"]
    assert found["k.1"].is_kernel and found["k.1"].operands == ("copy-done", "a")
    assert found["copy-start"].copied_bytes == 8 * 128 * 2
    assert found["copy-done"].layout == "1,0:T(8,128)(2,1)S(1)"


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each == "v6e" else pytest.mark.slow) for each in TARGETS])
def test_blocks_and_bytes_of_a_kernel_with_skipped_blocks(estimators, name):
    """The lengths decide how many blocks are computed and copied."""
    block, columns = 256, 16
    job = FunctionJob(
        f"{PEERS}:sum_of_first_blocks",
        (Array("int32", (4,)), Array("bfloat16", (4 * block, columns * block))),
        name,
        {"block": block},
    )
    estimator = estimators(name)
    assert "depends on a value that is not known" in estimator.function(job).refused
    few, all_ = (estimator.function(job, {0: lengths}) for lengths in ([1, 2, 3, 5], [16] * 4))
    assert few.ok and all_.ok, few.error + all_.error
    share = TARGETS[name].cores  # two cores take turns: the first one's part is followed
    for result, computed in ((few, 11), (all_, 64)):
        (kernel,) = result.kernels
        assert kernel.name.startswith("first_blocks") and kernel.calls == 1
        passes = sum(path[2] for path in kernel.paths if path[3])
        assert passes == computed if share == 1 else 0 < passes <= computed
        if share == 1:
            out = computed * block * block * 2
            # Each block in and out; where XLA brings an operand into VMEM whole, all of it in.
            read = 4 * columns * block * block * 2 if result.prefetch_bytes > 2**20 else out
            assert result.hbm_bytes == pytest.approx(read + out, rel=0.01)
        assert 0 < kernel.units["MATMUL"] < 1
        assert result.seconds > (result.cycles / TARGETS[name].clock_hz)
    assert few.seconds < all_.seconds / 2


def test_a_module_is_estimated_and_a_loop_is_refused(estimators, tmp_path):
    estimator = estimators("v6e")
    plain, loops, bad = (tmp_path / name for name in ("plain.mlir", "loops.mlir", "bad.mlir"))
    square = "tensor<2048x2048xf32>"
    plain.write_text(
        f"module {{ func.func @main(%a: {square}) -> {square} {{\n"
        f"  %b = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : ({square}, {square}) -> {square}\n"
        f"  return %b : {square}\n}} }}\n"
    )
    loops.write_text(
        "module { func.func @main(%n: tensor<i32>, %a: tensor<8x128xf32>) -> tensor<8x128xf32> {\n"
        "  %zero = stablehlo.constant dense<0> : tensor<i32>\n  %one = stablehlo.constant dense<1> : tensor<i32>\n"
        "  %r:2 = stablehlo.while(%i = %zero, %x = %a) : tensor<i32>, tensor<8x128xf32>\n"
        "   cond { %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        "     stablehlo.return %c : tensor<i1> }\n"
        "   do { %j = stablehlo.add %i, %one : tensor<i32>\n     %y = stablehlo.sine %x : tensor<8x128xf32>\n"
        "     stablehlo.return %j, %y : tensor<i32>, tensor<8x128xf32> }\n"
        "  return %r#1 : tensor<8x128xf32>\n} }\n"
    )
    bad.write_text("module { nonsense }")
    result = estimator.module(plain)
    assert result.ok, result.error
    assert not result.kernels and result.operations and not result.unseen
    floor = 2 * 2048**3 / TARGETS["v6e"].flops_per_second
    assert floor < result.seconds < 20 * floor
    refused = estimator.module(loops)
    assert refused.compiled.ok and "how often it runs is not known" in refused.refused
    failed = estimator.module(bad)
    assert not failed.ok and failed.compiled.stage == "compile"


def test_estimates_are_for_one_generation(estimators):
    job = FunctionJob(f"{PEERS}:double", (Array("float32", (8, 128)),), "v5e")
    with pytest.raises(ValueError, match="the job is for v5e, this estimator for v6e"):
        estimators("v6e").function(job)
    # A failed job leaves the worker usable, and the next one's dump is its own.
    broken = estimators("v6e").function(FunctionJob(f"{PEERS}:refuses_to_trace", (Array("float32", (8, 128)),), "v6e"))
    assert (broken.compiled.stage, broken.ok) == ("trace", False)
    fine = estimators("v6e").function(FunctionJob(f"{PEERS}:double", (Array("float32", (8, 128)),), "v6e"))
    assert fine.ok and len(fine.kernels) == 1, fine.error
