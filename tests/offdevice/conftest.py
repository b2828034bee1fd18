"""What several tests of programs for a TPU share."""

from __future__ import annotations

import pytest

from tpu_kernels.offdevice.schedule import Estimator


@pytest.fixture(scope="module")
def estimators():
    """An Estimator of each target that is asked for: starting one takes seconds, and its estimates share a process."""
    made: dict[str, Estimator] = {}

    def get(name: str) -> Estimator:
        if name not in made:
            made[name] = Estimator(name, timeout=120)
        return made[name]

    yield get
    for each in made.values():
        each.close()
