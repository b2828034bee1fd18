"""`tpu-kernels verify ORG/REPO`: anybody's kernel, pulled from the Hub, and what it may claim; by its name alone, by a
spec.toml that names it, and by an installed package that brings such a spec."""

from __future__ import annotations

import json

import pytest

from tpu_kernels import staging
from tpu_kernels.scaffold import write_kernel
from tpu_kernels.specs import packaged_specs_dir

REPO = "acme/their-attention"
CASES = ["softcap", "holes in the padding", "192/128 (MLA)", "no mask, full float32 D128"]


@pytest.fixture
def theirs(tmp_path, loopback):
    """A third party's kernel: the commit that is published, and a spec.toml that names the repository and nothing else."""
    (tmp_path / "source").mkdir()
    source = write_kernel("their-attention", tmp_path / "source", "acme")
    staging.stage(source, tmp_path / "built")
    commit = loopback.publish(REPO, "v1", tmp_path / "built")
    folder = tmp_path / "specs" / "their-attention"
    folder.mkdir(parents=True)
    text = (source / "spec.toml").read_text()
    assert text.count('hub = ""') == 1
    (folder / "spec.toml").write_text(text.replace('hub = ""', f'hub = "{REPO}"'))
    return commit, folder


def verified(machine, what: object, cases: list[str] = CASES, before=(), **environment: str):
    """(exit code, the report as JSON)."""
    job = machine.start(*before, ("verify_some", [cases, str(what), "--json"]), JAX_PLATFORMS="cpu", **environment)
    done = job.results(300)[-1]
    text = done["output"]
    return done["code"], json.loads(text[text.index("{") : text.rindex("}") + 1]) if "{" in text else {"error": text}


@pytest.mark.slow
def test_by_the_name_of_the_repository(machine, theirs, loopback):
    code, report = verified(machine, REPO)
    assert code == 0 and report["kernel"] == "acme-their-attention" and report["what"] == "emulated on CPU"
    assert {each["name"] for each in report["results"] if each["refused"]} == {"gradients"}
    assert report["claims"] == {
        "dtypes": ["float32", "bfloat16"], "masks": ["none", "ranges", "ranges+validity"], "max_head_dim": 192, "gqa": True,
        "v_head_dim_may_differ": True, "softcap": True, "sinks": False, "gradients": False, "any_length": True,
        "unproved": ["sinks"],
    }  # fmt: skip
    assert loopback.asked("resolve") != []
    again, offline = verified(machine, f"{REPO}@{theirs[0]}", HF_HUB_OFFLINE="1")
    assert again == 0 and offline["claims"] == report["claims"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["path", "entry point"])
def test_by_a_spec_that_names_the_repository(machine, theirs, tmp_path, how):
    """Then the kernel has its own name, and calls that its spec.toml does not promise are refused."""
    commit, folder = theirs
    (folder / "spec.toml").write_text((folder / "spec.toml").read_text().replace("softcap = true", "softcap = false"))
    before, environment = [], {}
    if how == "path":
        environment["TPU_KERNELS_SPECS"] = str(folder)
    else:
        site = tmp_path / "site"
        (site / "acme_kernels-1.2.dist-info").mkdir(parents=True)
        (site / "acme_kernels").mkdir()
        (site / "acme_kernels" / "__init__.py").write_text("raise RuntimeError('imported')\n")
        folder.rename(site / "acme_kernels" / "their-attention")
        (site / "acme_kernels-1.2.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.2\n"
        )
        (site / "acme_kernels-1.2.dist-info" / "entry_points.txt").write_text("[tpu_kernels.specs]\nacme = acme_kernels\n")
        before = [("install", [str(site)])]
    for what in (REPO, "their-attention"):
        code, report = verified(machine, what, before=before, **environment)
        assert code == 0 and report["kernel"] == "their-attention"
        assert {each["name"]: each["refused"] for each in report["results"] if each["refused"]} == {
            "softcap": "softcap", "gradients": "gradients",
        }  # fmt: skip
        assert report["claims"]["softcap"] is False and report["claims"]["unproved"] == ["sinks"]


@pytest.mark.slow
def test_a_kernel_without_ranges(machine, loopback, tmp_path):
    """Known by its forward, which takes `causal`."""
    staging.stage(packaged_specs_dir() / "splash-attention", tmp_path / "built")
    loopback.publish(REPO, "v1", tmp_path / "built")
    code, report = verified(machine, REPO, ["softcap", "no mask, full float32 D128", "no mask, large scores"])
    assert code == 0 and report["claims"]["masks"] == ["none"] and report["claims"]["any_length"] is False
    assert {each["refused"] for each in report["results"] if each["name"] == "softcap"} == {"range_mask"}


def test_an_untrusted_publisher_is_refused_before_anything_is_downloaded(machine, publish, loopback):
    publish(repo="stranger/small-kernel")
    (done,) = machine.run(("verify_some", [CASES, "stranger/small-kernel"]))
    assert done["code"] == 2 and "TPU_KERNELS_TRUST=stranger/small-kernel" in done["output"]
    assert loopback.asked("resolve") == [] and machine.bodies() == 0


def test_repositories_that_cannot_be_verified(machine, publish, loopback):
    publish(body="def attend():\n    pass\n")
    told = {
        "acme/nothing": "there is no Hub repository 'acme/nothing'",
        "acme/small-kernel@v7": "has no branch v7; it has v1",
        "acme/small-kernel": "its module has no function forward(q, k, v, starts, ends, ...)",
    }
    results = machine.run(*(("verify_some", [CASES, what]) for what in told))
    for done, says in zip(results, told.values(), strict=True):
        assert done["code"] == 2 and says in done["output"], done["output"]


@pytest.mark.slow
def test_a_kernel_that_fails_every_check_may_claim_nothing(machine, publish):
    publish(body="def forward(q, k, v, starts, ends, *rest, **static):\n    return q * 0\n")
    (done,) = machine.start(("verify_some", [CASES, "acme/small-kernel"]), JAX_PLATFORMS="cpu").results(300)
    assert done["code"] == 1 and "acme-small-kernel may claim nothing" in done["output"]
