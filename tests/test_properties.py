"""Random calls over the whole request space against attention in float64 (random_calls.py).

Whatever route a call takes, the numbers must be right, and the route must be the one that its facts ask for. Without options
these are the same calls each time. 20,000 new ones (about an hour of one core), or another number in EXAMPLES; with the
seed that pytest prints, the same again:

    pytest tests/test_properties.py -k many -s --hypothesis-profile=long [--hypothesis-seed=N]
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

import tpu_kernels

from .random_calls import calls, check, listed

LONG = settings.get_current_profile_name() == "long"


def run(examples: int, geometries: int, fresh: int, seed: int = 7, device: str = "cpu") -> Counter[str]:
    """How many calls took each route's reason."""
    tpu_kernels.register()
    reasons: Counter[str] = Counter()

    @given(calls(listed(geometries, seed), fresh))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True,
              derandomize=not LONG, database=None)  # fmt: skip
    def collect(call):
        try:
            reason, needed = check(call, device)
        except Exception as error:  # noqa: BLE001 -- a long run tells every failure, not only the first
            if not LONG:
                raise
            print(f"WRONG: {type(error).__name__}: {error}", flush=True)
            reasons["WRONG"] += 1
            return
        reasons[reason] += 1
        reasons["(held against a longer call too)"] += needed

    try:
        collect()
    finally:
        total = sum(reasons.values()) - reasons["(held against a longer call too)"]
        print(f"random calls: {total - reasons['WRONG']} of {total} right, {dict(reasons)}")
    assert not reasons["WRONG"]
    return reasons


def test_random_calls_are_right_on_any_route():
    reasons = run(120, geometries=14, fresh=0, seed=2421)  # whose list has every kind
    assert {"kernel", "dtype", "dense_mask", "position_bias"} <= set(reasons)


@pytest.mark.slow
def test_many_random_calls_are_right_on_any_route(request):
    seed = request.config.getoption("hypothesis_seed")
    examples = settings().max_examples if LONG else 1000
    reasons = run(examples, geometries=examples // 100, fresh=100, seed=int(seed or 7))
    assert sum(reasons.values()) >= examples // 2


@pytest.mark.tpu
def test_random_calls_are_right_on_a_tpu():
    run(500, geometries=100, fresh=0, device="tpu")
