"""The packaged range-attention kernel, published to a loopback Hub and pulled from there: the same numbers."""

from __future__ import annotations

import pytest

from tpu_kernels import staging
from tpu_kernels.specs import packaged_specs_dir

REPO = "acme/range-attention"


@pytest.mark.slow
def test_published_pulled_and_run(machine, loopback, tmp_path):
    packaged = packaged_specs_dir() / "range-attention"
    staging.stage(packaged, tmp_path / "built")
    commit = loopback.publish(REPO, "v1", tmp_path / "built")
    pulled = tmp_path / "specs" / "range-attention"
    pulled.mkdir(parents=True)
    text = (packaged / "spec.toml").read_text()
    assert text.count('hub = ""') == 1
    (pulled / "spec.toml").write_text(text.replace('hub = ""', f'hub = "{REPO}"\nversion = 1', 1))
    online, offline, local = (
        machine.run(("attention", [str(folder)]), HF_HUB_OFFLINE=away, JAX_PLATFORMS="cpu")[0]
        for folder, away in ((pulled, "0"), (pulled, "1"), (packaged, "1"))
    )
    assert [online["source"], offline["source"], local["source"]] == ["hub", "hub-cache", "packaged"]
    assert online["revision"] == offline["revision"] == commit
    assert online["out"] == offline["out"] == local["out"] and online["error"] < 1e-6
