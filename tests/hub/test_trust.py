"""Whose kernels are run: decided before anything is downloaded, by the Hub's word for the publisher or by name."""

from __future__ import annotations

import json

import pytest

from .conftest import REPO
from .loopback import Fault

STRANGER = "stranger/small-kernel"


def nothing_touched(machine, loopback) -> bool:
    return loopback.asked("resolve") == [] and loopback.asked("/tree/") == [] and machine.bodies() == 0


@pytest.mark.parametrize("repo", [STRANGER, "user-jane/small-kernel"], ids=["organization", "user"])
def test_untrusted_publisher(machine, publish, spec_for, loopback, repo):
    commit = publish(repo=repo)
    for pin in ("version = 1", f'revision = "{commit}"'):
        got = machine.load(spec_for(pin, repo=repo, packaged=True))
        assert f"'{repo}' is not from a trusted publisher" in got["error"]
        assert f"TPU_KERNELS_TRUST={repo}" in got["error"] and nothing_touched(machine, loopback)


@pytest.mark.parametrize("trust", [STRANGER, f"other/one, {STRANGER} ,other/two"])
def test_allowed_by_name_in_the_environment(machine, publish, spec_for, loopback, trust):
    publish(repo=STRANGER)
    got = machine.load(spec_for(repo=STRANGER), TPU_KERNELS_TRUST=trust)
    assert (got["source"], got["value"]) == ("hub", "first") and loopback.asked("overview") == []


@pytest.mark.parametrize("trust", ["", "stranger", "stranger/*", "stranger/small", f"{STRANGER}-2", "1", "true", "acme/k"])
def test_other_names_do_not_allow_it(machine, publish, spec_for, loopback, trust):
    publish(repo=STRANGER)
    got = machine.load(spec_for(repo=STRANGER), TPU_KERNELS_TRUST=trust)
    assert "not from a trusted publisher" in got["error"] and nothing_touched(machine, loopback)


def test_allowed_by_its_spec(machine, publish, spec_for, loopback):
    publish(repo=STRANGER)
    assert machine.load(spec_for("version = 1\ntrusted = true", repo=STRANGER))["source"] == "hub"


@pytest.mark.parametrize("answer", [b"{}", b'{"trustedKernelPublisher": false}', b'{"trustedKernelPublisher": "yes"}'])
def test_only_a_plain_yes_is_a_yes(machine, publish, spec_for, loopback, answer):
    publish()
    loopback.spoil = lambda method, path: Fault(body=answer) if "overview" in path else None
    assert "not from a trusted publisher" in machine.load(spec_for())["error"] and nothing_touched(machine, loopback)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_no_answer_about_the_publisher_is_a_no(machine, publish, spec_for, loopback, status):
    publish()
    loopback.spoil = lambda method, path: Fault(status) if "overview" in path else None
    assert "not from a trusted publisher" in machine.load(spec_for())["error"] and nothing_touched(machine, loopback)


def test_an_answer_that_is_no_json(machine, publish, spec_for, loopback):
    publish()
    loopback.spoil = lambda method, path: Fault(body=b"<html>") if "overview" in path else None
    got = machine.load(spec_for(packaged=True))
    assert "JSONDecodeError" in got["error"] and nothing_touched(machine, loopback)


def test_a_publisher_that_lost_trust(machine, publish, spec_for, loopback):
    commit = publish()
    by_version, by_commit = spec_for(), spec_for(f'revision = "{commit}"')
    machine.load(by_version)
    loopback.trusted.clear()
    assert "not from a trusted publisher" in machine.load(by_version)["error"]
    # A pinned commit was trusted when it was downloaded, and does not change.
    assert machine.load(by_commit)["source"] == "hub-cache"


def test_permission_by_name_is_not_remembered(machine, publish, spec_for, loopback):
    publish(repo=STRANGER)
    spec = spec_for(repo=STRANGER)
    assert machine.load(spec, TPU_KERNELS_TRUST=STRANGER)["source"] == "hub"
    assert "not from a trusted publisher" in machine.load(spec)["error"]
    loopback.stop()
    got = machine.load(spec)
    assert "whether its publisher is trusted is not known" in got["error"] and STRANGER in got["error"]
    assert machine.load(spec, TPU_KERNELS_TRUST=STRANGER)["source"] == "hub-cache"


def test_what_something_else_downloaded_is_not_trusted_offline(machine, publish, spec_for, loopback):
    """kernels skips its trust check when offline; this package does not."""
    commit = publish()
    machine.run(("stock", [REPO, 1]))
    offline = {"HF_HUB_OFFLINE": "1"}
    by_commit = spec_for(f'revision = "{commit}"')
    got = machine.load(by_commit, **offline)
    assert "whether its publisher is trusted is not known" in got["error"] and machine.bodies() == 1
    assert machine.load(by_commit, TPU_KERNELS_TRUST=REPO, **offline)["source"] == "hub-cache"
    assert machine.load(by_commit)["source"] == "hub"  # online: the publisher is trusted, nothing to download
    assert machine.load(by_commit, **offline)["source"] == "hub-cache"


def test_a_damaged_note_about_downloads(machine, publish, spec_for):
    publish()
    spec = spec_for()
    machine.load(spec)
    (note,) = (machine.home / "cache" / "hub").glob("*.json")
    note.write_text("{")
    got = machine.load(spec)
    assert f"{note} is damaged" in got["error"] and "Delete it" in got["error"]


@pytest.mark.slow
def test_a_model_cannot_make_this_package_load_a_kernel(machine, publish, loopback, tmp_path):
    """config.json comes with a model, from anybody."""
    publish(repo=STRANGER), publish()
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": STRANGER,
        "_attn_implementation": STRANGER, "kernel": REPO, "trusted": True,
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (got,) = machine.run(("model", [str(folder)]))
    assert got == {"attention": "tpu_attention", "reasons": ["kernel"], "kernels": ["range-attention"]}
    assert loopback.asked() == [] and machine.bodies() == 0
