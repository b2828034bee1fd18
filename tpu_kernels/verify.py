"""A self-check of kernels on this machine's device: parity with SDPA, invariances, known answers.

`tpu-kernels verify` and `python -m tpu_kernels.verify` run it. On a TPU host everything runs on the TPU; elsewhere the
kernels are emulated on CPU, and the report says so.

The rule: the largest error against float64 is at most twice that of SDPA in the same dtype on the same inputs and device,
plus one unit in the last place of the largest output (SDPA may be exact by chance).

With one kernel named, calls go to it alone; what its spec.toml does not promise is told as refused, and the report says
what the kernel may claim.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import fallback, hub, masks
from .attention import LEDGER, make_known, tpu_attention
from .reasons import REASONS
from .specs import KernelSpec
from .tuning import attached_chip

_VERSIONS = ("tpu-kernels", "torch", "torch_tpu", "transformers", "kernels", "jax", "jaxlib", "libtpu", "numpy")
# Two orders of summation of values of order 1 in float32 differ by no more than this.
_ROUNDING = 16 * torch.finfo(torch.float32).eps


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call. pads: keys hidden at the start of each batch element; window, softcap, sinks: 0/False for none.

    holes: every so-many-th key is hidden by validity, 0 for none. masked: whether the call carries a mask at all;
    causal rows are aligned at the last key with a mask, at the first without.
    """

    name: str
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 40
    kv_len: int = 40
    head_dim: int = 64
    v_head_dim: int = 0
    dtype: str = "bfloat16"
    causal: bool = True
    pads: tuple[int, ...] = ()
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    magnitude: float = 1.0
    holes: int = 0
    masked: bool = True

    @property
    def shape(self) -> str:
        """The sizes, such as "B2 H4/2 40x257 D192/128": batch, query and KV heads, queries x keys, head sizes."""
        dims = f"{self.head_dim}/{self.v_head_dim}" if self.v_head_dim else f"{self.head_dim}"
        return f"B{self.batch} H{self.q_heads}/{self.kv_heads} {self.q_len}x{self.kv_len} D{dims}"

    def asks_for(self) -> frozenset[str]:
        """What a kernel that does this case right has shown to do, as `Claims` names it."""
        features = {
            f"dtype {self.dtype}": True,
            "mask none": not self.masked,
            "mask ranges": self.masked and not self.holes,
            "mask ranges+validity": self.holes > 0,
            "gqa": self.q_heads != self.kv_heads,
            "v_head_dim_may_differ": self.v_head_dim not in (0, self.head_dim),
            "softcap": self.softcap > 0,
            "sinks": self.sinks,
            "any length": bool(self.q_len % 128 or self.kv_len % 128),
        }
        return frozenset(name for name, asked in features.items() if asked)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one check. error and allowed are absolute, in the unit of the output; NaN where a check has no error.

    refused: the reason code with which the kernel's spec.toml refused the call; then nothing was checked.
    dtype, shape: of the call of a parity check, as `Case` has them; "" elsewhere.
    """

    group: str
    name: str
    passed: bool
    detail: str
    error: float = math.nan
    allowed: float = math.nan
    sdpa_error: float = math.nan
    refused: str = ""
    dtype: str = ""
    shape: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Claims:
    """What the checks have shown that a kernel does exactly, in the words of spec.toml.

    any_length: also lengths that are no multiple of 128. unproved: what the kernel's spec.toml says and no check has shown.
    """

    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    max_head_dim: int
    gqa: bool
    v_head_dim_may_differ: bool
    softcap: bool
    sinks: bool
    gradients: bool
    any_length: bool
    unproved: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """All results, and what they were obtained on. `what` is "on TPU v6e" or "emulated on CPU".

    kernel, claims: the name of the one kernel that was checked, and what it may claim; "" and None for all installed ones.
    """

    what: str
    device: str
    versions: dict[str, str]
    results: tuple[Result, ...]
    kernel: str = ""
    claims: Claims | None = None

    @property
    def passed(self) -> bool:
        checked = [result for result in self.results if not result.refused]
        return bool(checked) and all(result.passed for result in checked)

    def to_json(self) -> str:
        made = datetime.datetime.now(datetime.UTC).isoformat()
        document = dataclasses.asdict(self) | {"passed": self.passed, "made": made}
        for result in document["results"]:
            for key in ("error", "allowed", "sdpa_error"):
                result[key] = result[key] if math.isfinite(result[key]) else None  # JSON has neither NaN nor infinity
        return json.dumps(document, indent=2, allow_nan=False)


def parity_cases(large: bool) -> list[Case]:
    """The fixed suite; `large` adds the lengths that only hardware gets through quickly."""
    cases = [
        Case(f"causal {dtype} D{dim}", head_dim=dim, q_len=length, kv_len=length, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for dim, length in ((64, 40), (72, 129), (128, 257))
    ]
    cases += [
        Case("full, length not a multiple of a block", causal=False, q_len=77, kv_len=577, q_heads=2, dtype="float32"),
        Case("left padding", pads=(23, 0), q_len=40, kv_len=40),
        Case("rows without keys", pads=(39, 40), q_len=40, kv_len=40, dtype="float32"),
        Case("sliding window", window=16, q_len=130, kv_len=130, dtype="float32"),
        Case("softcap", softcap=30.0, magnitude=6.0, dtype="float32"),
        Case("sinks and window", sinks=True, window=16, q_heads=8, dtype="float32"),
        Case("multi-query", q_heads=8, kv_heads=1),
        Case("192/128 (MLA)", head_dim=192, v_head_dim=128, kv_heads=4),
        Case("head size 256", head_dim=256),
        Case("head size 512", head_dim=512, q_len=24, kv_len=24),
        Case("decode", q_len=1, kv_len=256, pads=(11, 0), dtype="float32"),
        Case("decode bfloat16", q_len=1, kv_len=256, q_heads=8, pads=(11, 0)),
        Case("decode, several rows", q_len=5, kv_len=200, window=64, dtype="float32"),
        Case("keys all alike", magnitude=0.0, q_len=129, kv_len=129),
        Case("holes in the padding", holes=3, pads=(4, 0), dtype="float32"),
    ]
    cases += [
        Case(f"no mask, {'causal' if causal else 'full'} {dtype} D{dim}", head_dim=dim, q_len=256, kv_len=256, causal=causal,
             dtype=dtype, masked=False)
        for causal, dtype, dim in ((True, "float32", 64), (True, "bfloat16", 128), (False, "float32", 128))
    ]  # fmt: skip
    cases += [
        Case("no mask, large scores", head_dim=128, q_len=128, kv_len=128, magnitude=30.0, masked=False),
        Case("no mask, head size 256", head_dim=256, q_len=128, kv_len=128, masked=False),
        Case("no mask, 192/128, more keys", head_dim=192, v_head_dim=128, q_len=128, kv_len=256, masked=False),
        Case("no mask, softcap, fewer keys", softcap=30.0, magnitude=6.0, q_len=256, kv_len=128, dtype="float32",
             masked=False),
        Case("no mask, sinks, multi-query", sinks=True, q_heads=8, kv_heads=1, q_len=128, kv_len=128, dtype="float32",
             masked=False),
    ]  # fmt: skip
    if large:
        cases += [
            Case(f"causal {dtype} S{length} D{dim}", 1, 4, 2, length, length, dim, dtype=dtype)
            for dtype in ("float32", "bfloat16")
            for length, dim in ((1000, 64), (2048, 128), (4096, 128), (4096, 256))
        ]
        cases.append(Case("decode, long cache", 8, 32, 8, 1, 8192, 128, pads=(0, 1, 100, 4096, 8000, 8191, 0, 0)))
    return cases


_GRADIENTS = Case("gradients", pads=(5, 0), q_len=72, kv_len=72, dtype="float32")


class _Refused(Exception):
    """The kernel's spec.toml does not promise to do the call; args[0] is the reason code."""


class Suite:
    """Runs the checks on one device ("tpu" or "cpu"), for the kernel of that name or for whichever takes the call."""

    def __init__(self, device: str, kernel: str = "") -> None:
        self.device, self.kernels = device, (kernel,) if kernel else None

    def run(self, large: bool) -> Iterator[Result]:
        """Every check, one after another."""
        parity: list[tuple[Case, Callable[[], Result]]]
        parity = [(case, functools.partial(self.parity, case)) for case in parity_cases(large)]
        for case, run in (*parity, (_GRADIENTS, self.gradients)):
            result = _guarded("parity", case.name, run)
            yield dataclasses.replace(result, dtype=case.dtype, shape=case.shape)
        for check in (self.same_bits_twice, self.batch_order, self.batch_size, self.padding, self.chunks):
            yield _guarded("invariance", check.__name__, check)
        for check in (self.one_hot_window, self.hidden_keys_are_not_read, self.grouped_heads):
            yield _guarded("known answer", check.__name__, check)

    def attention(self, case: Case, q: Any, k: Any, v: Any, mask: Any, sinks: Any = None) -> torch.Tensor:
        """tpu_attention on the device, back on the CPU as [B, Q, Hq, Dv]. Raises where it did not run on a kernel."""
        LEDGER.clear()
        with torch.no_grad():
            q, k, v, mask, sinks = (None if each is None else each.to(self.device) for each in (q, k, v, mask, sinks))
            out, _ = tpu_attention(
                torch.nn.Identity(), q, k, v, mask, softcap=case.softcap or None, s_aux=sinks, is_causal=case.causal,
                kernels=self.kernels,
            )  # fmt: skip
        self._check_route(case)
        return out.cpu()

    def _check_route(self, case: Case) -> None:
        (row,) = LEDGER.explain({}, ()).rows
        if self.kernels and row.reason not in ("kernel", "disabled"):
            raise _Refused(row.reason)
        if row.reason != "kernel":
            raise RuntimeError(f"{case.name}: ran on {row.route} ({row.reason}), not on a kernel")

    def parity(self, case: Case) -> Result:
        """The kernel against float64, and SDPA (eager for softcap and sinks) against the same."""
        q, k, v, sinks, visible, mask = make(case)
        got = self.attention(case, q, k, v, mask if case.masked else None, sinks)
        exact = reference(case, q, k, v, visible, sinks)
        moved = [each.to(self.device) for each in (q, k, v, visible)]
        scale = case.head_dim**-0.5
        with torch.no_grad():
            if case.softcap or case.sinks:
                moved_sinks = None if sinks is None else sinks.to(self.device)
                peer, _ = fallback.eager(
                    *moved, causal=False, scale=scale, softcap=case.softcap, sinks=moved_sinks
                )  # fmt: skip
            else:
                peer = fallback.sdpa(*moved, causal=False, scale=scale)
        peer_error = _distance(peer.cpu().transpose(1, 2), exact)
        error = _distance(got, exact)
        allowed = 2 * peer_error + torch.finfo(q.dtype).eps * float(exact.abs().max())
        return Result("parity", case.name, error <= allowed, _not_a_number(error), error, allowed, peer_error)

    def gradients(self) -> Result:
        """The gradients of q, k, v against float64, and SDPA's against the same."""
        case = _GRADIENTS
        q, k, v, _, visible, mask = make(case)
        shape = (case.batch, case.q_len, case.q_heads, case.head_dim)
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))

        def gradients(attend: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
            learned = [each.detach().requires_grad_() for each in inputs]
            out = attend(*learned)
            (out * weights.to(out)).sum().backward()
            return [each.grad.cpu() for each in learned if each.grad is not None]

        def ours(*inputs: torch.Tensor) -> torch.Tensor:
            LEDGER.clear()
            q, k, v = inputs
            out, _ = tpu_attention(torch.nn.Identity(), q, k, v, mask.to(self.device), kernels=self.kernels)
            self._check_route(case)
            return out

        def sdpa(*inputs: torch.Tensor) -> torch.Tensor:
            q, k, v = inputs
            seen = visible.to(self.device)
            return fallback.sdpa(q, k, v, seen, causal=False, scale=case.head_dim**-0.5).transpose(1, 2)

        def formula(*inputs: torch.Tensor) -> torch.Tensor:
            q, k, v = inputs
            return reference(case, q, k, v, visible, None)

        moved = [each.to(self.device) for each in (q, k, v)]
        exact = gradients(formula, q.double(), k.double(), v.double())
        got, peers = gradients(ours, *moved), gradients(sdpa, *moved)
        errors, peer_errors = ([_distance(a, b) for a, b in zip(made, exact, strict=True)] for made in (got, peers))
        eps = torch.finfo(q.dtype).eps
        limits = [2 * peer + eps * float(want.abs().max()) for peer, want in zip(peer_errors, exact, strict=True)]
        worst = max(range(3), key=lambda i: errors[i] / limits[i])
        return Result("parity", case.name, errors[worst] <= limits[worst], f"worst: d{'qkv'[worst]}", errors[worst],
                      limits[worst], peer_errors[worst])  # fmt: skip

    def same_bits_twice(self) -> Result:
        case = Case("same input, same bits", q_len=129, kv_len=129, pads=(5, 0))
        q, k, v, _, _, mask = make(case)
        first, second = (self.attention(case, q, k, v, mask) for _ in range(2))
        return _invariance(case.name, first, second)

    def batch_order(self) -> Result:
        case = Case("order of the batch", batch=3, pads=(5, 0, 17))
        q, k, v, _, _, mask = make(case)
        order = torch.tensor([2, 0, 1])
        whole = self.attention(case, q, k, v, mask)
        return _invariance(case.name, whole[order], self.attention(case, q[order], k[order], v[order], mask[order]))

    def batch_size(self) -> Result:
        case = Case("size of the batch", batch=3, pads=(5, 0, 17))
        q, k, v, _, _, mask = make(case)
        whole = self.attention(case, q, k, v, mask)
        alone = [self.attention(case, q[i : i + 1], k[i : i + 1], v[i : i + 1], mask[i : i + 1]) for i in range(3)]
        return _invariance(case.name, whole, torch.cat(alone))

    def padding(self) -> Result:
        """A left-padded row equals the same row without its padding."""
        case = Case("left padding changes nothing", batch=1, pads=(13,), dtype="float32")
        q, k, v, _, _, mask = make(case)
        padded = self.attention(case, q, k, v, mask)[:, 13:]
        alone = self.attention(case, q[:, :, 13:], k[:, :, 13:], v[:, :, 13:], None)
        return _invariance(case.name, padded, alone, _ROUNDING)

    def chunks(self) -> Result:
        """Prefill in one piece equals prefill in two."""
        case = Case("prefill in chunks", batch=1, q_len=40, kv_len=40, dtype="float32")
        q, k, v, _, _, mask = make(case)
        whole = self.attention(case, q, k, v, mask)
        pieces = []
        for start, end in ((0, 25), (25, 40)):
            ends = torch.arange(start + 1, end + 1)[None]
            seen = masks.encode_ranges(torch.zeros_like(ends), ends, None, end)
            pieces.append(self.attention(case, q[:, :, start:end], k[:, :, :end], v[:, :, :end], seen))
        return _invariance(case.name, whole, torch.cat(pieces, 1), _ROUNDING)

    def one_hot_window(self) -> Result:
        """Equal scores and one-hot values show which keys a row saw: exactly the last `window` ones, itself included."""
        window, length = 5, 12
        case = Case("a window of 5 sees 5 keys", batch=1, q_heads=1, kv_heads=1, dtype="float32")
        q = torch.zeros(1, 1, length, length)
        starts = (torch.arange(length) - window + 1)[None]
        mask = masks.encode_ranges(starts, torch.arange(1, length + 1)[None], None, length)
        got = self.attention(case, q, q, torch.eye(length)[None, None], mask)[0, :, 0]
        want = torch.zeros(length, length)
        for row in range(length):
            seen = range(max(0, row - window + 1), row + 1)
            want[row, list(seen)] = 1 / len(seen)
        return _invariance(case.name, got, want, _ROUNDING, group="known answer")

    def hidden_keys_are_not_read(self) -> Result:
        """NaN and infinity in keys that no row sees leave no trace."""
        case = Case("NaN in hidden keys", pads=(9, 0))
        q, k, v, _, _, mask = make(case)
        clean = self.attention(case, q, k, v, mask)
        k, v = k.clone(), v.clone()
        k[0, :, :9], v[0, :, :9] = math.nan, math.inf
        return _invariance(case.name, clean, self.attention(case, q, k, v, mask), group="known answer")

    def grouped_heads(self) -> Result:
        """Query head h reads KV head h // group: each KV head's values are its own number."""
        case = Case("order of grouped heads", batch=1, q_heads=6, kv_heads=3, dtype="float32")
        q, k, _, _, _, mask = make(case)
        v = torch.arange(3.0)[None, :, None, None].expand(1, 3, 40, 8)
        want = torch.tensor([0.0, 0, 1, 1, 2, 2])[None, None, :, None].expand(1, 40, 6, 8)
        return _invariance(case.name, self.attention(case, q, k, v, mask), want, _ROUNDING, group="known answer")


def _guarded(group: str, name: str, check: Callable[[], Result]) -> Result:
    """A check that raises has failed, and the others still run."""
    try:
        return check()
    except _Refused as refusal:
        code = refusal.args[0]
        return Result(group, name, False, f"not claimed: {REASONS[code].sentence}", refused=code)
    except Exception as error:  # noqa: BLE001  # compilers and runtimes raise all kinds; the text goes into the report
        return Result(group, name, False, f"{type(error).__name__}: {error}")


def make(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(q, k, v, sinks, visible bool [B, 1, Q, KV], range mask) of a case, on CPU, the same each time."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q = (normal(case.batch, case.q_heads, case.q_len, case.head_dim) * case.magnitude).to(dtype)
    k = normal(case.batch, case.kv_heads, case.kv_len, case.head_dim).to(dtype)
    v = normal(case.batch, case.kv_heads, case.kv_len, case.v_head_dim or case.head_dim).to(dtype)
    sinks = normal(case.q_heads) if case.sinks else None
    starts = torch.tensor(case.pads or (0,) * case.batch)[:, None].expand(case.batch, case.q_len)
    position = (torch.arange(case.q_len) + (case.kv_len - case.q_len if case.masked else 0))[None]
    ends = position + 1 if case.causal else torch.full_like(position, case.kv_len)
    ends = ends.clamp(max=case.kv_len).expand(case.batch, case.q_len)
    if case.window:
        starts = torch.maximum(starts, position - case.window + 1)
    keys = torch.arange(case.kv_len)
    visible = ((keys >= starts[..., None]) & (keys < ends[..., None]))[:, None]
    valid = None
    if case.holes:
        valid = (keys % case.holes != 1).expand(case.batch, case.kv_len)
        visible = visible & valid[:, None, None]
    return q, k, v, sinks, visible, masks.encode_ranges(starts, ends, valid, case.kv_len)


def reference(case: Case, q: Any, k: Any, v: Any, visible: torch.Tensor, sinks: Any) -> torch.Tensor:
    """Attention in float64, [B, Q, Hq, Dv]; written apart from every kernel and fallback. Rows without keys are 0."""
    group = case.q_heads // case.kv_heads
    out = []
    for head in range(case.q_heads):
        scores = q[:, head].double() @ k[:, head // group].double().transpose(1, 2) * case.head_dim**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~visible[:, 0], -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().expand(*scores.shape[:2], 1)), -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : case.kv_len]
        out.append(weights @ v[:, head // group].double())
    return torch.stack(out, 2)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one side is not a number."""
    difference = (got.double() - want.double()).abs()
    return math.inf if torch.isnan(difference).any() else float(difference.max())


def _not_a_number(error: float) -> str:
    return "NaN or infinity in the output" if math.isinf(error) else ""


def _invariance(
    name: str, first: torch.Tensor, second: torch.Tensor, allowed: float = 0.0, group: str = "invariance"
) -> Result:
    error = _distance(first, second)
    return Result(group, name, error <= allowed, _not_a_number(error), error, allowed)


def find_device() -> tuple[str, str]:
    """(device, what results are to be called)."""
    chip = attached_chip()
    return ("tpu", f"on {chip}") if chip else ("cpu", "emulated on CPU")


def checks(device: str) -> int:
    """How many checks the suite has on `device`."""
    return len(parity_cases(device == "tpu")) + 9


def claims(results: tuple[Result, ...], device: str, declared: KernelSpec) -> Claims:
    """What a kernel may claim: what some case showed and no case put in doubt.

    A case that failed puts in doubt those of its features that no case has shown, and all of them if every one was shown.
    """
    by_name = {result.name: result for result in results if result.group == "parity"}
    cases = [case for case in parity_cases(device == "tpu") if not by_name[case.name].refused]
    right = [case for case in cases if by_name[case.name].passed]
    wrong = [case for case in cases if not by_name[case.name].passed]
    shown: frozenset[str] = frozenset().union(*(case.asks_for() for case in right))
    doubtful: frozenset[str] = frozenset().union(
        *(case.asks_for() if case.asks_for() <= shown else () for case in wrong)
    )
    proved = shown - doubtful
    dims = sorted({max(case.head_dim, case.v_head_dim) for case in right})
    too_large = [case.head_dim for case in wrong if case.head_dim not in dims]
    can = declared.capabilities
    made = Claims(
        dtypes=tuple(each for each in ("float32", "bfloat16") if f"dtype {each}" in proved),
        masks=tuple(each for each in ("none", "ranges", "ranges+validity") if f"mask {each}" in proved),
        max_head_dim=max((dim for dim in dims if all(dim < other for other in too_large)), default=0) if proved else 0,
        gqa="gqa" in proved,
        v_head_dim_may_differ="v_head_dim_may_differ" in proved,
        softcap="softcap" in proved,
        sinks="sinks" in proved,
        gradients=by_name["gradients"].passed,
        any_length="any length" in proved,
    )
    unproved = [f"dtype {each}" for each in can.dtypes if each not in made.dtypes]
    unproved += [f"mask {each}" for each in can.masks if each not in made.masks]
    unproved += [
        each for each in ("gqa", "v_head_dim_may_differ", "softcap", "sinks", "gradients")
        if getattr(can, each) and not getattr(made, each)
    ]  # fmt: skip
    if can.length_multiple == 1 and not made.any_length:
        unproved.append("lengths that are no multiple of 128")
    return dataclasses.replace(made, unproved=tuple(unproved))


def verify(progress: Callable[[Result], None] = lambda result: None, kernel: KernelSpec | None = None) -> Report:
    """Run the whole suite on this machine's device. Clears the counts behind `explain()`.

    Args:
        progress: called with each result.
        kernel: check this kernel alone; by default whichever installed kernel takes each call, and all calls must be taken.

    Raises:
        hub.KernelLoadError: when `kernel` cannot be loaded.
        specs.SpecError: when its name is that of another kernel.
    """
    device, what = find_device()
    if kernel is not None:
        make_known(kernel)
        hub.load_kernel(kernel)
    subject = "" if kernel is None else kernel.name
    results = []
    for result in Suite(device, subject).run(large=device == "tpu"):
        results.append(result)
        progress(result)
    LEDGER.clear()
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    claimed = None if kernel is None else claims(tuple(results), device, kernel)
    return Report(what, device, versions, tuple(results), subject, claimed)


if __name__ == "__main__":
    from .cli import app

    app(["verify", *sys.argv[1:]])
