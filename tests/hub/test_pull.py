"""Kernels from a Hub over real HTTP, with the real huggingface_hub and kernels: what comes, and what every fault ends in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kernels._rust import Digest, DigestAlgorithm

from .conftest import REPO
from .loopback import Fault
from .small_kernel import BODY

ABSENT = "ab" * 20


def test_by_version(machine, publish, spec_for):
    commit = publish()
    got = machine.load(spec_for())
    assert (got["source"], got["revision"], got["why"], got["value"]) == ("hub", commit, "head of v1", "first")
    assert str(machine.home / "hf" / "hub" / "kernels--acme--small-kernel") in got["location"]
    assert got["warnings"] == []


def test_by_commit(machine, publish, spec_for):
    commit = publish()
    publish(value="second")
    got = machine.load(spec_for(f'revision = "{commit}"'))
    assert (got["source"], got["revision"], got["value"]) == ("hub", commit, "first")


def test_kernels_cache_is_honoured(machine, publish, spec_for, tmp_path):
    publish()
    got = machine.load(spec_for(), KERNELS_CACHE=str(tmp_path / "elsewhere"))
    assert got["location"].startswith(str(tmp_path / "elsewhere"))


def test_only_the_build_for_tpu_is_downloaded(machine, publish, spec_for, loopback):
    def add_cuda(variant: Path) -> None:
        (variant.parent / "torch-cuda").mkdir()
        (variant.parent / "torch-cuda" / "big.so").write_bytes(b"x")

    publish(change=add_cuda)
    machine.load(spec_for())
    assert machine.cached("big.so") == [] and loopback.asked("big.so") == [] and loopback.asked("README") == []


def test_a_universal_build_serves_too(machine, publish, spec_for):
    publish(change=lambda variant: variant.rename(variant.with_name("torch-universal")))
    got = machine.load(spec_for())
    assert got["source"] == "hub" and got["location"].endswith("build/torch-universal")


def test_second_run_downloads_nothing(machine, publish, spec_for, loopback):
    commit = publish()
    by_version, by_commit = spec_for(), spec_for(f'revision = "{commit}"')
    machine.load(by_version)
    loopback.requests.clear()
    got = machine.load(by_version)
    assert (got["source"], got["value"]) == ("hub", "first")
    assert [path.split("/")[2] for _, path in loopback.asked()] == ["organizations", "kernels"]
    loopback.requests.clear()
    got = machine.load(by_commit)
    assert (got["source"], got["revision"]) == ("hub-cache", commit) and loopback.asked() == []


@pytest.mark.parametrize("away", ["offline", "down"])
def test_after_one_load_the_hub_is_not_needed(machine, publish, spec_for, loopback, away):
    commit = publish()
    by_version, by_commit = spec_for(packaged=True), spec_for(f'revision = "{commit}"', packaged=True)
    machine.load(by_version)
    offline = {"HF_HUB_OFFLINE": "1"} if away == "offline" else {}
    loopback.stop()
    for spec in (by_version, by_commit):
        got = machine.load(spec, **offline)
        assert (got["source"], got["revision"], got["value"]) == ("hub-cache", commit, "first")
    got = machine.load(by_version, **offline)
    assert "does not answer" in got["why"] and "from the cache serves" in got["warnings"][0]
    assert ("HF_HUB_OFFLINE is set" if away == "offline" else "ConnectError") in got["why"]


@pytest.mark.parametrize("away", ["offline", "down"])
def test_hub_away_and_nothing_downloaded(machine, publish, spec_for, loopback, away):
    publish()
    offline = {"HF_HUB_OFFLINE": "1"} if away == "offline" else {}
    loopback.stop()
    got = machine.load(spec_for(packaged=True), **offline)
    assert (got["source"], got["value"]) == ("packaged", "packaged")
    assert "does not answer" in got["why"] and "The packaged copy serves instead" in got["warnings"][0]
    got = machine.load(spec_for(), **offline)
    assert REPO in got["error"] and "does not answer" in got["error"] and "tpu-kernels prefetch" in got["error"]


def test_a_branch_that_moved(machine, publish, spec_for, loopback):
    first = publish()
    spec = spec_for()
    machine.load(spec)
    second = publish(value="second")
    got = machine.load(spec)
    assert (got["source"], got["revision"], got["value"]) == ("hub", second, "second")
    assert machine.load(spec_for(f'revision = "{first}"'))["value"] == "first"
    third = publish(value="third")
    loopback.stop()
    got = machine.load(spec)
    assert (got["source"], got["revision"], got["value"]) == ("hub-cache", second, "second") and third != second


def test_no_build_for_tpu(machine, publish, spec_for):
    publish(change=lambda variant: variant.rename(variant.with_name("torch-cuda")))
    got = machine.load(spec_for(packaged=True))
    assert "no build that runs on a TPU (torch-tpu or torch-universal); it has torch-cuda" in got["error"]


def test_no_builds_at_all(machine, loopback, spec_for):
    loopback.publish(REPO, "v1", {"README.md": b"# soon\n"})
    assert "it has no builds" in machine.load(spec_for(packaged=True))["error"]


def test_no_such_repository(machine, publish, spec_for, loopback):
    for pin in ("version = 1", f'revision = "{ABSENT}"'):
        got = machine.load(spec_for(pin, packaged=True))
        assert f"there is no Hub repository '{REPO}', or it is private" in got["error"] and "hf auth login" in got["error"]


def test_no_such_version(machine, publish, spec_for):
    publish("v1"), publish("v2"), publish("main")
    got = machine.load(spec_for("version = 7", packaged=True))
    assert f"'{REPO}' has no branch v7; it has main, v1, v2" in got["error"] and "source.version" in got["error"]


def test_no_such_commit(machine, publish, spec_for):
    publish()
    got = machine.load(spec_for(f'revision = "{ABSENT}"', packaged=True))
    assert f"'{REPO}' has no commit {ABSENT}" in got["error"]


def spoil_once(loopback, part, fault, times=1, method="GET"):
    """The first `times` requests for a path with `part` in it get `fault`."""
    left = [times]

    def spoil(asked, path):
        if asked == method and part in path and left[0]:
            left[0] -= 1
            return fault
        return None

    loopback.spoil = spoil
    return left


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("where", ["overview", "/revision/", "/tree/", "resolve"])
def test_a_busy_hub_is_asked_again(machine, publish, spec_for, loopback, status, where):
    publish()
    method = "HEAD" if where == "resolve" else "GET"
    left = spoil_once(loopback, where, Fault(status, {"Retry-After": "0"} if status == 429 else {}), method=method)
    got = machine.load(spec_for(packaged=True))
    assert left == [0] and (got.get("source"), got.get("value")) == ("hub", "first"), got


def test_a_hub_that_stays_broken(machine, publish, spec_for, loopback):
    commit = publish()
    loopback.spoil = lambda method, path: Fault(503)
    packaged, alone = spec_for(packaged=True), spec_for()
    got, failed = (job.results()[0] for job in [machine.start(("load", [str(spec)])) for spec in (packaged, alone)])
    assert got["source"] == "packaged" and "HTTP status 503" in got["why"]
    assert "HTTP status 503" in failed["error"]
    loopback.spoil = lambda method, path: None
    machine.load(alone)
    loopback.spoil = lambda method, path: Fault(500)
    got = machine.load(alone)
    assert (got["source"], got["revision"]) == ("hub-cache", commit) and "HTTP status 500" in got["why"]


@pytest.mark.parametrize("where", ["overview", "/revision/", "/tree/"])
def test_a_hub_that_does_not_answer_in_time(machine, publish, spec_for, loopback, where):
    publish()
    loopback.spoil = lambda method, path: Fault(delay=30) if where in path else None
    got = machine.load(spec_for(packaged=True), HF_HUB_ETAG_TIMEOUT="1")
    assert got["source"] == "packaged" and "Timeout" in got["why"] and got["seconds"] < 10


@pytest.mark.slow
def test_files_that_come_too_slowly(machine, publish, spec_for, loopback):
    publish()
    loopback.spoil = lambda method, path: Fault(delay=30) if "parts.py" in path and method == "GET" else None
    got = machine.load(spec_for(packaged=True), HF_HUB_DOWNLOAD_TIMEOUT="1")
    # huggingface_hub resumes five times, a second apart, before it gives up.
    assert got["source"] == "packaged" and "Timeout" in got["why"] and got["seconds"] < 25


def test_a_connection_cut_in_a_file_is_resumed(machine, publish, spec_for, loopback):
    publish()
    left = spoil_once(loopback, "parts.py", Fault(cut=10))
    got = machine.load(spec_for())
    assert left == [0] and (got["source"], got["value"]) == ("hub", "first")


@pytest.mark.parametrize("wrong", [b"", b"VALUE = ", b"print('longer than it was')\n" * 50], ids=["empty", "short", "long"])
def test_a_file_of_the_wrong_size_is_not_imported(machine, publish, spec_for, loopback, wrong):
    publish()
    loopback.spoil = lambda method, path: Fault(body=wrong) if "parts.py" in path and method == "GET" else None
    got = machine.load(spec_for(packaged=True))
    assert "Consistency check failed" in got["error"] and machine.bodies() == 0
    loopback.spoil = lambda method, path: None
    assert machine.load(spec_for())["value"] == "first"


def test_a_file_of_the_right_size_but_other_bytes_is_not_imported(machine, publish, spec_for, loopback):
    publish()
    size = len(next(iter(loopback.repositories[REPO].commits.values()))["build/torch-tpu/parts.py"])
    loopback.spoil = lambda method, path: Fault(body=b"#" * size) if "parts.py" in path else None
    got = machine.load(spec_for(packaged=True))
    assert "parts.py" in got["error"] and "not imported" in got["error"] and machine.bodies() == 0
    assert str(machine.home / "hf" / "hub" / "kernels--acme--small-kernel") in got["error"]
    loopback.spoil = lambda method, path: None
    got = machine.load(spec_for())  # what is damaged in the cache is downloaded again
    assert (got["source"], got["value"]) == ("hub", "first")


def damage(machine, name="parts.py"):
    (path,) = machine.cached(name)
    blob = path.resolve()
    blob.write_bytes(b"#" * blob.stat().st_size)


def drop_digest(variant: Path) -> None:
    document = json.loads((variant / "metadata.json").read_text())
    del document["digest"]
    (variant / "metadata.json").write_text(json.dumps(document))


@pytest.mark.parametrize("change", [None, drop_digest], ids=["digest", "no digest"])
def test_damage_in_the_cache_is_mended_online_and_refused_offline(machine, publish, spec_for, loopback, change):
    commit = publish(change=change)
    by_version, by_commit = spec_for(packaged=True), spec_for(f'revision = "{commit}"', packaged=True)
    machine.load(by_version)
    for spec in (by_version, by_commit):
        damage(machine)
        got = machine.load(spec, HF_HUB_OFFLINE="1")
        assert "parts.py" in got["error"] and "not imported" in got["error"]
        assert machine.load(spec)["value"] == "first"
    assert machine.bodies() == 3


def test_a_sha512_digest(machine, publish, spec_for):
    def change(variant: Path) -> None:
        files = dict(Digest.hash_variant(DigestAlgorithm.SHA512, variant).files)
        edit_metadata(digest={"algorithm": "sha512", "files": files})(variant)

    publish(change=change)
    spec = spec_for()
    assert machine.load(spec)["value"] == "first"
    (note,) = (machine.home / "cache" / "hub").glob("*.json")
    note.unlink()
    damage(machine)
    got = machine.load(spec, HF_HUB_OFFLINE="1", TPU_KERNELS_TRUST=REPO)
    assert "does not answer" in got["error"]  # which commit v1 was is not known any more
    got = machine.load(spec_for(f'revision = "{commit_in_cache(machine)}"'), HF_HUB_OFFLINE="1", TPU_KERNELS_TRUST=REPO)
    assert "parts.py" in got["error"] and "not imported" in got["error"]


def commit_in_cache(machine) -> str:
    (path,) = machine.cached("parts.py")
    return path.parents[2].name


def test_a_hub_that_gives_no_commit(machine, publish, spec_for, loopback):
    publish()
    loopback.spoil = lambda method, path: Fault(body=b'{"sha": "../../elsewhere"}') if "/revision/" in path else None
    got = machine.load(spec_for(packaged=True))
    assert "'../../elsewhere' as the commit of v1" in got["error"]


@pytest.mark.parametrize(
    ("document", "named"),
    [("{", "parse metadata"), ("{}", "missing field"), ('{"name": "small-kernel"}', "missing field")],
)
def test_wrong_metadata(machine, publish, spec_for, document, named):
    publish(change=lambda variant: (variant / "metadata.json").write_text(document))
    got = machine.load(spec_for(packaged=True))
    assert "metadata.json cannot be read" in got["error"] and named in got["error"] and machine.bodies() == 0


def test_no_metadata(machine, publish, spec_for):
    publish(change=lambda variant: (variant / "metadata.json").unlink())
    got = machine.load(spec_for(packaged=True))
    assert "metadata.json cannot be read" in got["error"] and machine.bodies() == 0


def edit_metadata(**changes):
    def change(variant: Path) -> None:
        document = json.loads((variant / "metadata.json").read_text())
        (variant / "metadata.json").write_text(json.dumps(document | changes))

    return change


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"id": "json"}, "has the id 'json', the name of an imported module"),
        ({"kernel-depends": [{"repo-id": "acme/other", "version": 1}]}, "depends on other kernels (acme/other)"),
        ({"kernels-minver": "99.0.0"}, "requires kernels>=99.0.0"),
        ({"python-depends": ["jax"]}, "unsupported kernel dependency: jax"),
    ],
)
def test_builds_that_are_not_loaded(machine, publish, spec_for, changes, named):
    publish(change=edit_metadata(**changes))
    got = machine.load(spec_for(packaged=True))
    assert named in got["error"] and machine.bodies() == 0


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("raise OSError('no such luck')\n", "OSError: no such luck"),
        ("import no_such_package\n", "needs the Python package 'no_such_package': pip install no_such_package"),
        ("def forward(:\n", "SyntaxError"),
        ("forward = 3\n", "lacks forward, which its spec.toml promises"),
    ],
)
def test_a_kernel_that_fails_at_import(machine, publish, spec_for, body, named):
    publish(body="from .parts import value\n" + body)
    got = machine.load(spec_for(packaged=True))
    assert named in got["error"] and "small-kernel" in got["error"] and got["left"] == []


def test_four_threads_load_once(machine, publish, spec_for, loopback):
    publish()
    (got,) = machine.run(("load", [str(spec_for()), 4]))
    assert got["same"] and machine.bodies() == 1
    assert (
        len(loopback.asked("overview")) == 1 and len([1 for method, _ in loopback.asked("parts.py") if method == "GET"]) == 1
    )


def test_four_processes_download_at_once(machine, publish, spec_for, loopback):
    publish()
    loopback.spoil = lambda method, path: Fault(delay=0.3) if "resolve" in path else None
    spec = spec_for()
    jobs = [machine.start(("load", [str(spec)])) for _ in range(4)]
    got = [job.results()[0] for job in jobs]
    assert [(each["source"], each["value"]) for each in got] == [("hub", "first")] * 4
    assert machine.bodies() == 4


def test_killed_while_downloading(machine, publish, spec_for, loopback):
    publish()
    loopback.spoil = lambda method, path: Fault(delay=30) if "parts.py" in path and method == "GET" else None
    spec = spec_for(packaged=True)
    job = machine.start(("load", [str(spec)]))
    deadline = time.monotonic() + 30
    while not loopback.asked("parts.py") and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGKILL)
    assert machine.load(spec, HF_HUB_OFFLINE="1")["source"] == "packaged"  # half a build is none
    loopback.spoil = lambda method, path: None
    got = machine.load(spec)
    assert (got["source"], got["value"]) == ("hub", "first")


@pytest.mark.parametrize("variable", ["HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"])
def test_telemetry_switched_off(machine, publish, spec_for, variable):
    publish()
    got, stock = machine.run(("load", [str(spec_for())]), ("stock", [REPO, 1]), **{variable: "1"})
    assert (got["source"], got["value"]) == ("hub", "first")
    # kernels' own get_kernel fails then (0.17.2): when this fails, kernels has mended it and doctor need not warn.
    assert "header" in stock["error"] or "trust status" in stock["error"]


def test_the_cache_is_shared_with_kernels(machine, publish, spec_for, loopback):
    publish()
    (stock,) = machine.run(("stock", [REPO, 1]))
    loopback.requests.clear()
    got = machine.load(spec_for())
    assert str(Path(stock["file"]).parent.resolve()) == str(Path(got["location"]).resolve())
    assert loopback.asked("parts.py") == []
    loopback.requests.clear()
    (stock,) = machine.run(("stock", [REPO, 1]))
    assert stock["value"] == "first" and loopback.asked("parts.py") == []


def padded(variant: Path) -> None:
    (variant / "table.bin").write_bytes(os.urandom(400_000))
    edit_metadata()(variant)
    drop_digest(variant)


def test_a_file_that_cannot_be_written(machine, publish, spec_for):
    publish(change=padded)
    spec = spec_for(packaged=True)
    (_, got) = machine.run(("limit_file_size", [100_000]), ("load", [str(spec)]))
    assert "File too large" in got["error"] and "free space" in got["error"] and machine.bodies() == 0
    assert machine.load(spec)["value"] == "first"


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(machine, publish, spec_for, small_disk):
    publish(change=padded)
    spec = spec_for(packaged=True)
    got = machine.load(spec, KERNELS_CACHE=str(small_disk))
    assert "No space left" in got["error"] and "free space" in got["error"] and machine.bodies() == 0
    assert machine.load(spec)["value"] == "first"


def test_full_disk_for_the_packaged_copy(machine, spec_for, small_disk, loopback):
    (small_disk / "ballast").write_bytes(b"x" * 200_000)
    spec = spec_for(packaged=True, extra="X = 1\n" + "#" * 100_000)
    loopback.stop()
    got = machine.load(spec, TPU_KERNELS_CACHE=str(small_disk))
    assert "cannot be staged" in got["error"] and "No space left" in got["error"] and "TPU_KERNELS_CACHE" in got["error"]
    (small_disk / "ballast").unlink()
    assert machine.load(spec, TPU_KERNELS_CACHE=str(small_disk))["source"] == "packaged"


def test_body_log_counts(machine, publish, spec_for):
    """The other tests trust this count."""
    assert "BODY_LOG" in BODY
    publish()
    machine.load(spec_for())
    assert machine.bodies() == 1
