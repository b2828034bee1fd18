"""`tpu-kernels prefetch` and `tpu-kernels lock`: what they leave behind is what offline and pinned loading need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernels._rust import KernelDependency, KernelLocks, KernelVersion

from .conftest import REPO

ABSENT = "ab" * 20


def command(*arguments: object) -> tuple[str, list[object]]:
    return "command", [str(argument) for argument in arguments]


def locked(path: Path, repo: str = REPO, version: int = 1) -> str:
    """What kernels itself reads from a lock file."""
    return KernelLocks.from_json(path.read_text())[KernelDependency(repo, KernelVersion.Version(version))].commit


def test_prefetch_primes_offline_loading_for_everybody(machine, publish, spec_for, loopback):
    commit = publish()
    by_version, by_commit = spec_for(), spec_for(f'revision = "{commit}"')
    (done,) = machine.run(command("prefetch", by_version, "--json"))
    assert done["code"] == 0 and machine.bodies() == 0
    (row,) = json.loads(done["output"])
    assert (row["kernel"], row["source"], row["revision"]) == ("small-kernel", "hub", commit)
    loopback.stop()
    for spec in (by_version, by_commit):
        got = machine.load(spec, HF_HUB_OFFLINE="1")
        assert (got["source"], got["revision"], got["value"]) == ("hub-cache", commit, "first")
    for pin in ([REPO, 1], [REPO, None, commit]):
        (stock,) = machine.run(("stock", pin), HF_HUB_OFFLINE="1")
        assert stock.get("value") == "first", stock


def test_kernels_alone_does_not_prime_itself(machine, publish, loopback):
    """When this fails, kernels (0.17.2) or huggingface_hub (2.4) has mended it and `prefetch` need not fetch everything."""
    publish()
    (stock,) = machine.run(("stock", [REPO, 1]))
    assert stock["value"] == "first"
    (stock,) = machine.run(("stock", [REPO, 1]), HF_HUB_OFFLINE="1")
    assert "not available in the local cache" in stock["error"]


def test_prefetch_of_a_pinned_commit(machine, publish, spec_for, loopback):
    commit = publish()
    publish(value="second")
    spec = spec_for(f'revision = "{commit}"')
    (done,) = machine.run(command("prefetch", spec))
    assert done["code"] == 0 and commit[:8] in done["output"].replace("\n", "")
    assert machine.load(spec, HF_HUB_OFFLINE="1")["value"] == "first"


def test_prefetch_of_all_installed_kernels(machine, loopback):
    (done,) = machine.run(command("prefetch", "--json"))
    rows = json.loads(done["output"])
    assert done["code"] == 0 and "range-attention" in [row["kernel"] for row in rows]
    assert {row["source"] for row in rows} == {"packaged"} and all(Path(row["folder"]).is_dir() for row in rows)


@pytest.mark.parametrize("what", ["untrusted", "down", "unknown"])
def test_prefetch_that_fails(machine, publish, spec_for, loopback, what):
    publish(repo="stranger/small-kernel"), publish()
    spec: object = spec_for(repo="stranger/small-kernel" if what == "untrusted" else REPO, packaged=True)
    if what == "down":
        loopback.stop()
    if what == "unknown":
        spec = "no-such-kernel"
    (done,) = machine.run(command("prefetch", spec))
    expected = {
        "untrusted": "not from a trusted publisher",
        "down": "does not answer",
        "unknown": "neither an installed kernel",
    }
    assert done["code"] != 0 and expected[what] in " ".join(done["output"].replace("│", " ").split())


def test_lock_and_load(machine, publish, spec_for, loopback):
    commit = publish()
    spec = spec_for()
    (done,) = machine.run(command("lock", spec))
    lockfile = machine.home / "project" / "kernels.lock"
    assert done["code"] == 0 and locked(lockfile) == commit and machine.bodies() == 0
    publish(value="second")
    got = machine.load(spec)
    assert (got["source"], got["revision"], got["value"]) == ("hub", commit, "first")
    assert got["why"] == f"commit in {lockfile}"
    lockfile.unlink()
    assert machine.load(spec)["value"] == "second"


def test_lock_named_by_the_environment(machine, publish, spec_for, tmp_path):
    commit = publish()
    spec = spec_for()
    path = tmp_path / "locks" / "mine.lock"
    path.parent.mkdir()
    machine.run(command("lock", spec, "--output", path))
    publish(value="second")
    assert machine.load(spec)["value"] == "second"
    got = machine.load(spec, TPU_KERNELS_LOCK=str(path))
    assert (got["revision"], got["value"]) == (commit, "first")


def test_lock_shipped_beside_the_kernels(machine, publish, spec_for):
    commit = publish()
    spec = spec_for()
    machine.run(command("lock", spec, "--output", spec.parent / "kernels.lock"))
    publish(value="second")
    assert machine.load(spec)["revision"] == commit


def test_locked_and_prefetched_and_offline(machine, publish, spec_for, loopback):
    commit = publish()
    spec = spec_for()
    machine.run(command("lock", spec))
    publish(value="second")
    machine.run(command("prefetch", spec))
    loopback.stop()
    got = machine.load(spec, HF_HUB_OFFLINE="1")
    assert (got["source"], got["revision"], got["value"]) == ("hub-cache", commit, "first")


def test_lock_again_moves_on_and_keeps_the_others(machine, publish, spec_for):
    first = publish()
    other = publish("v2", repo="acme/small-other", name="small-other")
    one, two = spec_for(), spec_for("version = 2", repo="acme/small-other", name="small-other")
    machine.run(command("lock", one), command("lock", two))
    lockfile = machine.home / "project" / "kernels.lock"
    assert (locked(lockfile), locked(lockfile, "acme/small-other", 2)) == (first, other)
    second = publish(value="second")
    machine.run(command("lock", one))
    assert (locked(lockfile), locked(lockfile, "acme/small-other", 2)) == (second, other)


def test_kernels_loads_by_our_lock_and_we_by_theirs(machine, publish, spec_for):
    commit = publish()
    spec = spec_for()
    project = machine.home / "project"
    machine.run(command("lock", spec))
    ours = (project / "kernels.lock").read_text()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = 1\n')
    (theirs,) = machine.run(("kernels_command", ["lock", str(project)]))
    assert theirs["code"] == 0 and json.loads((project / "kernels.lock").read_text()) == json.loads(ours)
    publish(value="second")
    assert machine.load(spec)["revision"] == commit


def test_what_needs_no_lock(machine, publish, spec_for):
    commit = publish()
    (done,) = machine.run(command("lock", "range-attention", spec_for(f'revision = "{commit}"'), "--json"))
    states = [row["state"] for row in json.loads(done["output"])]
    assert done["code"] == 0 and ["packaged" in states[0], "names the commit" in states[1]] == [True, True]
    assert not (machine.home / "project" / "kernels.lock").exists()


@pytest.mark.parametrize("what", ["untrusted", "down", "no version"])
def test_lock_that_fails_leaves_the_file_alone(machine, publish, spec_for, loopback, what):
    publish(), publish(repo="stranger/small-kernel")
    good = spec_for()
    machine.run(command("lock", good))
    lockfile = machine.home / "project" / "kernels.lock"
    before = lockfile.read_text()
    publish(value="second")
    bad = spec_for("version = 9" if what == "no version" else "version = 1",
                   repo="stranger/small-kernel" if what == "untrusted" else REPO)  # fmt: skip
    if what == "down":
        loopback.stop()
    (done,) = machine.run(command("lock", good, bad, "--json"))
    assert done["code"] == 1 and lockfile.read_text() == before


BAD_LOCKS = {
    "not JSON": "{",
    "before 0.17": json.dumps([{"repo_id": REPO, "sha": ABSENT, "variants": {}}]),
    "short commit": json.dumps([{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": "abc"}}]),
}


@pytest.mark.parametrize("text", BAD_LOCKS.values(), ids=BAD_LOCKS)
def test_a_lock_file_that_is_none(machine, publish, spec_for, text):
    publish()
    lockfile = machine.home / "project" / "kernels.lock"
    lockfile.write_text(text)
    loading, locking = machine.run(("load", [str(spec_for(packaged=True))]), command("lock", spec_for()))
    assert f"{lockfile} is not a kernels lock file" in loading["error"] and "tpu-kernels lock" in loading["error"]
    assert locking["code"] == 1 and lockfile.read_text() == text


def test_a_named_lock_file_must_lock_the_kernel(machine, publish, spec_for, tmp_path):
    publish()
    (tmp_path / "empty.lock").write_text("[]")
    got = machine.load(spec_for(), TPU_KERNELS_LOCK=str(tmp_path / "empty.lock"))
    assert f"does not lock {REPO} version 1" in got["error"] and "tpu-kernels lock --output" in got["error"]
    got = machine.load(spec_for(), TPU_KERNELS_LOCK=str(tmp_path / "nowhere.lock"))
    assert "nowhere.lock is not a kernels lock file: [Errno 2]" in got["error"]
    # One that merely lies there need not.
    (machine.home / "project" / "kernels.lock").write_text("[]")
    assert machine.load(spec_for())["source"] == "hub"


def test_a_locked_commit_that_is_gone(machine, publish, spec_for):
    publish()
    lockfile = machine.home / "project" / "kernels.lock"
    lockfile.write_text(json.dumps([{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": ABSENT}}]))
    assert f"has no commit {ABSENT}" in machine.load(spec_for(packaged=True))["error"]


def test_kernels_verifies_signatures_of_what_we_publish(machine, publish):
    """As documented: on any host with --all-variants, and an unsigned build is told."""
    publish()
    (done,) = machine.run(("kernels_command", ["verify-signature", REPO, "1", "--all-variants"]))
    assert done["code"] == 1 and "torch-tpu" in done["output"] and "signature not found" in done["output"]


def listed(machine, spec: Path, **environment: str) -> dict[str, object]:
    """What `tpu-kernels list` says of the kernel in folder `spec`; it asks the Hub nothing."""
    before = len(machine.hub.requests)
    (done,) = machine.run(command("list", "--json"), TPU_KERNELS_SPECS=str(spec), **environment)
    assert len(machine.hub.requests) == before
    rows = {row["name"]: row for row in json.loads(done["output"])}
    assert done["code"] == ("error" in rows["small-kernel"]["loads_from"])
    assert rows["small-kernel"]["found_by"] == f"TPU_KERNELS_SPECS={spec}"
    return rows["small-kernel"]["loads_from"]


def test_list_tells_where_kernels_would_come_from(machine, publish, spec_for, tmp_path):
    commit, spec = publish(), spec_for()
    new = {"source": "hub", "place": REPO, "revision": "", "why": "head of v1", "downloaded": False}
    assert listed(machine, spec) == new
    machine.load(spec)
    assert listed(machine, spec) == new | {"revision": commit, "downloaded": True}
    pinned = spec_for(f'revision = "{ABSENT}"')
    assert listed(machine, pinned) == new | {"revision": ABSENT, "why": "commit in spec.toml"}
    machine.run(command("lock", spec))
    lockfile = machine.home / "project" / "kernels.lock"
    assert listed(machine, spec) == new | {"revision": commit, "why": f"commit in {lockfile}", "downloaded": True}
    build = tmp_path / "published" / "0" / "built"
    local = listed(machine, spec, LOCAL_KERNELS=f"{REPO}={build}")
    assert (local["source"], local["place"], local["why"]) == ("local", f"{build}/build/torch-tpu", "LOCAL_KERNELS")
    assert "malformed" in listed(machine, spec, LOCAL_KERNELS="acme")["error"]
