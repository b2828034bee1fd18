"""From a Hub repository and a pin to a checked build in the local cache: lock, trust, commit, files.

`kernels.get_kernel` downloads and imports in one step, so that nothing can look at the files in between; it needs the Hub
again for what it has already downloaded, may wait for ever on a Hub that does not answer, and fails when telemetry is
switched off (0.17.2). Here the files come through huggingface_hub, into the cache that kernels uses, by commit. Importing
them stays with kernels (builds.py).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import filelock
from httpx2 import TransportError  # what huggingface_hub 2 speaks HTTP with
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

from . import locks
from .builds import KernelLoadError, cache_dir, check_files
from .specs import COMMIT, KernelSpec

# Builds without compiled code, in the order in which kernels prefers them on a TPU.
VARIANTS = ("torch-tpu", "torch-universal")
TRUST = "TPU_KERNELS_TRUST"
_BYTECODE = ["*.pyc", "**/__pycache__/**"]


class HubUnavailableError(RuntimeError):
    """The Hub does not answer (or is switched off), and the cache has nothing that may be used; says why."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A checked build. source tells whether the Hub was asked; why, if not, and which pin chose the commit."""

    variant: Path
    commit: str
    source: Literal["hub", "hub-cache"]
    why: str


def hub_cache() -> Path:
    """The folder of downloaded kernels, which is kernels' own: KERNELS_CACHE, else huggingface_hub's cache."""
    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE).expanduser()


def pull(spec: KernelSpec, *, everything: bool = False) -> Pulled:
    """The build of `spec` at its pin (commit, else lock file, else the head of branch vN), downloaded where needed.

    A commit that is in the cache is used without asking the Hub. When the Hub does not answer, so is the last commit
    of a version. Nothing is downloaded from a publisher that is not trusted.

    Args:
        spec: a kernel with source.hub.
        everything: download the whole repository, with which kernels' own functions work offline as well.

    Raises:
        KernelLoadError: untrusted publisher, no such repository, version or build, damaged files.
        HubUnavailableError: the Hub does not answer and the cache has nothing.
        HfHubHTTPError, OSError, ValueError: whatever else goes wrong in between.
    """
    repo = spec.source.hub
    pin, pinned_by = _pin(spec)
    commit = pin if not pin.startswith("v") else ""
    record = _Record(repo)
    if commit and not everything and _trusted(spec, record, commit):
        if (variant := _cached(repo, commit)) and _intact(spec, variant, record, commit):
            return Pulled(variant, commit, "hub-cache", f"{pinned_by}, already downloaded")
    try:
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        trusted_by = "name" if _trusted_by_name(spec) else _publisher(spec)
        commit = commit or _resolve(spec, pin)
        variant = None if everything else _cached(repo, commit)
        damaged = variant is not None and not _intact(spec, variant, record, commit)
        if variant is None or damaged:
            variant = _download(spec, commit, pin, everything=everything, force=damaged)
        files = check_files(spec.name, variant, _remedy(repo))
        record.add(commit, trusted_by, files, pin)
        return Pulled(variant, commit, "hub", pinned_by)
    except (TransportError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = f"{type(error).__name__}: {error}"
    except HfHubHTTPError as error:
        if error.response.status_code not in (408, 429) and error.response.status_code < 500:
            raise
        reason = f"HTTP status {error.response.status_code}"
    return _last_known(spec, record, commit, pin, reason)


def seen(spec: KernelSpec) -> tuple[str, str, bool]:
    """(commit, what chose it, whether its build is in the cache), without asking the Hub.

    The commit is the pinned one, else the last that was seen at the head of the version's branch, "" for none.
    """
    pin, pinned_by = _pin(spec)
    commit = _Record(spec.source.hub).versions.get(pin, "") if pin.startswith("v") else pin
    return commit, pinned_by, bool(commit) and _cached(spec.source.hub, commit) is not None


def newest_commit(spec: KernelSpec) -> str:
    """The head of the branch of `spec`'s version, from the Hub; its publisher must be trusted."""
    if not _trusted_by_name(spec):
        _publisher(spec)
    return _resolve(spec, f"v{spec.source.version}")


def _last_known(spec: KernelSpec, record: _Record, commit: str, pin: str, reason: str) -> Pulled:
    """What the cache has of `pin`, when the Hub does not answer because of `reason`."""
    repo = spec.source.hub
    commit = commit or record.versions.get(pin, "") or _cached_ref(repo, pin)
    variant = _cached(repo, commit) if commit else None
    if variant is None:
        raise HubUnavailableError(f"the Hub does not answer ({reason}) and {hub_cache()} has no complete copy of {pin}")
    if not _trusted(spec, record, commit):
        raise HubUnavailableError(
            f"the Hub does not answer ({reason}), and the copy in {hub_cache()} was not downloaded by this package, so "
            f"whether its publisher is trusted is not known: allow it by name, {TRUST}={repo}"
        )
    check_files(spec.name, variant, _remedy(repo), record.files(commit))
    return Pulled(variant, commit, "hub-cache", f"the Hub does not answer ({reason})")


def _pin(spec: KernelSpec) -> tuple[str, str]:
    """A commit, or "vN"; and where that comes from."""
    if spec.source.revision:
        return spec.source.revision, "commit in spec.toml"
    if locked := locks.locked_commit(spec):
        return locked.commit, f"commit in {locked.path}"
    return f"v{spec.source.version}", f"head of v{spec.source.version}"


def _trusted_by_name(spec: KernelSpec) -> bool:
    named = [entry.strip() for entry in os.environ.get(TRUST, "").split(",")]
    return spec.source.trusted or spec.source.hub in named


def _trusted(spec: KernelSpec, record: _Record, commit: str) -> bool:
    """Without asking the Hub: allowed by name, or the publisher was trusted when this commit was downloaded."""
    return _trusted_by_name(spec) or record.trusted_by(commit) == "publisher"


def _publisher(spec: KernelSpec) -> Literal["publisher"]:
    """Ask the Hub whether it trusts the publisher. Raises KernelLoadError when it does not."""
    repo = spec.source.hub
    try:
        overview = _get(f"organizations/{quote(repo.partition('/')[0])}/overview")
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403, 404):
            raise
        overview = {}  # a user's account, or no account at all
    if overview.get("trustedKernelPublisher") is not True:
        raise KernelLoadError(
            f"kernel {spec.name!r}: Hub repository {repo!r} is not from a trusted publisher; nothing of it was downloaded "
            f"or run. If you trust its code, allow it by name: {TRUST}={repo}"
        )
    return "publisher"


def _get(path: str) -> Any:
    """JSON from the Hub's API. Unlike HfApi's methods this never waits longer than HF_HUB_ETAG_TIMEOUT for an answer."""
    response = http_backoff(
        "GET",
        f"{constants.ENDPOINT}/api/{path}",
        headers=build_hf_headers(library_name="tpu_kernels"),
        timeout=constants.HF_HUB_ETAG_TIMEOUT,
        max_retries=3,
        base_wait_time=0.5,
        retry_on_exceptions=(),
        retry_on_status_codes=(429, 500, 502, 503, 504),
    )
    hf_raise_for_status(response)
    return response.json()


def _resolve(spec: KernelSpec, pin: str) -> str:
    """The commit at the head of branch `pin` ("vN")."""
    repo = spec.source.hub
    try:
        commit: str = _get(f"kernels/{repo}/revision/{pin}")["sha"]
    except RevisionNotFoundError as error:
        branches = [branch["name"] for branch in _get(f"kernels/{repo}/refs")["branches"]]
        raise KernelLoadError(
            f"kernel {spec.name!r}: Hub repository {repo!r} has no branch {pin}; it has {', '.join(sorted(branches))}. "
            "Correct source.version in its spec.toml."
        ) from error
    except RepositoryNotFoundError as error:
        raise KernelLoadError(_missing(spec)) from error
    if not COMMIT.fullmatch(commit):
        raise KernelLoadError(
            f"kernel {spec.name!r}: {constants.ENDPOINT} gives {commit!r} as the commit of {pin} of {repo}, which is none."
        )
    return commit


def _missing(spec: KernelSpec) -> str:
    return (
        f"kernel {spec.name!r}: there is no Hub repository {spec.source.hub!r}, or it is private: check source.hub in its "
        "spec.toml, or log in with `hf auth login`."
    )


def _download(spec: KernelSpec, commit: str, pin: str, *, everything: bool, force: bool) -> Path:
    repo = spec.source.hub
    try:
        entries = _get(f"kernels/{repo}/tree/{commit}/build")
    except RemoteEntryNotFoundError:
        entries = []
    except RepositoryNotFoundError as error:
        raise KernelLoadError(_missing(spec)) from error
    except RevisionNotFoundError as error:
        raise KernelLoadError(
            f"kernel {spec.name!r}: Hub repository {repo!r} has no commit {commit}. Correct the pin."
        ) from error
    builds = sorted(entry["path"].rpartition("/")[2] for entry in entries if entry["type"] == "directory")
    chosen = next((variant for variant in VARIANTS if variant in builds), None)
    if chosen is None:
        raise KernelLoadError(
            f"kernel {spec.name!r}: Hub repository {repo!r} at {commit} has no build that runs on a TPU "
            f"({' or '.join(VARIANTS)}); it has {', '.join(builds) or 'no builds'}."
        )
    if everything:
        # By name of the branch, so that huggingface_hub notes its commit, which kernels looks for when offline.
        snapshot_download(repo, repo_type="kernel", revision=pin, cache_dir=hub_cache(), library_name="tpu_kernels")
    snapshot = snapshot_download(
        repo,
        repo_type="kernel",
        revision=commit,
        cache_dir=hub_cache(),
        allow_patterns=[f"build/{chosen}/*"],
        ignore_patterns=_BYTECODE,
        force_download=force,
        library_name="tpu_kernels",
    )
    return Path(snapshot) / "build" / chosen


def _cached(repo: str, commit: str) -> Path | None:
    """The build of `commit` in the cache, if it is there with every file."""
    for variant in VARIANTS:
        try:
            snapshot = snapshot_download(
                repo,
                repo_type="kernel",
                revision=commit,
                cache_dir=hub_cache(),
                allow_patterns=[f"build/{variant}/*"],
                ignore_patterns=_BYTECODE,
                local_files_only=True,
            )
        except LocalEntryNotFoundError:
            continue
        if (folder := Path(snapshot) / "build" / variant).is_dir():
            return folder
    return None


def _cached_ref(repo: str, pin: str) -> str:
    """The commit that huggingface_hub noted for a branch when something else downloaded it; "" if none."""
    try:
        snapshot = snapshot_download(
            repo, repo_type="kernel", revision=pin, cache_dir=hub_cache(), allow_patterns=["build/*"], local_files_only=True
        )
    except LocalEntryNotFoundError:
        return ""
    return Path(snapshot).name


def _intact(spec: KernelSpec, variant: Path, record: _Record, commit: str) -> bool:
    try:
        check_files(spec.name, variant, "", record.files(commit))
    except KernelLoadError:
        return False
    return True


def _remedy(repo: str) -> str:
    folder = hub_cache() / f"kernels--{repo.replace('/', '--')}"
    return f"Delete {folder} and load again; if it stays so, the publisher's build is broken."


class _Record:
    """What this package noted when it downloaded a repository: per version the commit, per commit trust and digests.

    kernels keeps neither, and without them a copy in the cache can be neither chosen nor trusted when the Hub is away.
    """

    def __init__(self, repo: str) -> None:
        self._path = cache_dir() / "hub" / f"{repo.replace('/', '--')}.json"
        self._commits: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, str] = {}
        self._read()

    def _read(self) -> None:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            self.versions, self._commits = dict(document["versions"]), dict(document["commits"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise KernelLoadError(f"{self._path} is damaged ({error}). Delete it and load again.") from error

    def trusted_by(self, commit: str) -> str:
        """ "publisher" or "name"; "" for a commit that was not downloaded here."""
        return str(self._commits.get(commit, {}).get("trusted_by", ""))

    def files(self, commit: str) -> dict[str, str] | None:
        """Digests of the files of `commit` by path; None for a commit that was not downloaded here."""
        return self._commits[commit]["files"] if commit in self._commits else None

    def add(self, commit: str, trusted_by: str, files: dict[str, str], pin: str) -> None:
        """Note a download, on disk too. A process that notes another one at the same time loses nothing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{self._path}.lock"):
            self._read()
            if self.trusted_by(commit) == "publisher":
                trusted_by = "publisher"
            versions = self.versions | ({pin: commit} if pin.startswith("v") else {})
            commits = self._commits | {commit: {"trusted_by": trusted_by, "files": files}}
            if (versions, commits) == (self.versions, self._commits):
                return
            self.versions, self._commits = versions, commits
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps({"versions": versions, "commits": commits}, indent=2) + "\n", encoding="utf-8")
            os.replace(fresh, self._path)
