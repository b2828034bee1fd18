"""A Hugging Face Hub on the loopback interface: kernel repositories with branches and commits, over real HTTP.

It answers what huggingface_hub and kernels ask about `repo_type="kernel"`, and can be told to misbehave.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


def blob_id(data: bytes) -> str:
    """git's object id of a file, which the Hub uses as ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Fault:
    """How one request is spoiled.

    status: answer with it (and headers) instead. delay: seconds before the answer. cut: send only so many bytes of the body
    and close the connection. body: send this instead of the file, with a length that fits it.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None
    body: bytes | None = None


@dataclass
class Repository:
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)


class LoopbackHub:
    """Use as a context manager. `requests` lists (method, path); `spoil(method, path)` returns a Fault or None."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.trusted: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.spoil: Callable[[str, str], Fault | None] = lambda method, path: None
        self.stopping = threading.Event()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if not self.stopping.is_set():
            self.stopping.set()
            self._server.shutdown()
            self._server.server_close()

    def publish(self, repo: str, branch: str, root: Path | Mapping[str, bytes]) -> str:
        """Commit the files under `root` to `branch`. Returns the commit id."""
        if isinstance(root, Path):
            paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
            files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
        else:
            files = dict(root)
        repository = self.repositories.setdefault(repo, Repository())
        text = json.dumps([repo, len(repository.commits), {path: blob_id(data) for path, data in files.items()}])
        commit = hashlib.sha1(text.encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
        return commit

    def asked(self, part: str = "") -> list[tuple[str, str]]:
        """Requests whose path contains `part`, without the client's own housekeeping."""
        return [(method, path) for method, path in self.requests if part in path and "agent-harnesses" not in path]

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(request.path)
        path, query = url.path, urllib.parse.parse_qs(url.query)
        self.requests.append((request.command, path))
        fault = self.spoil(request.command, path) or Fault()
        if fault.delay:
            self.stopping.wait(fault.delay)
        if fault.status:
            status, headers, body = fault.status, dict(fault.headers), b'{"error": "told to fail"}'
        else:
            status, headers, body = self._find(path, query)
            body = body if fault.body is None else fault.body
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if wanted and status == 200:
            start, whole = int(wanted[1]), len(body)
            status, body = 206, body[start:]
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        try:
            request.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
                request.send_header(name, value)
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(body if fault.cut is None else body[: fault.cut])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up waiting
        if fault.cut is not None:
            request.close_connection = True

    def _find(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        if found := re.fullmatch(r"/api/organizations/([^/]+)/overview", path):
            name = found[1]
            if name.startswith("user-"):  # an account that is no organization
                return _error(404, "", "no such organization")
            trusted = name in self.trusted
            return _json({"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": trusted})
        if found := re.fullmatch(r"/api/kernels/([^/]+/[^/]+)(/.*)?", path):
            return self._api(found[1], found[2] or "", query)
        if found := re.fullmatch(r"/kernels/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            commit = self._commit(found[1], found[2])
            if commit is None:
                return _error(404, "RevisionNotFound", "no such revision")
            data = self.repositories[found[1]].commits[commit].get(urllib.parse.unquote(found[3]))
            if data is None:
                return _error(404, "EntryNotFound", "no such file", {"X-Repo-Commit": commit})
            return 200, {"ETag": f'"{blob_id(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, data
        return _error(404, "", f"no such route: {path}")

    def _api(self, repo: str, rest: str, query: Mapping[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        repository = self.repositories.get(repo)
        if repository is None:
            return _error(404, "RepoNotFound", "Repository not found")
        if rest == "/refs":
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                for name, commit in repository.branches.items()
            ]
            return _json({"branches": branches, "converts": [], "tags": []})
        found = re.fullmatch(r"/(revision|tree)/([^/]+)(?:/(.*))?", rest)
        if found is None:
            return _error(404, "", f"no such route: {rest}")
        commit = self._commit(repo, found[2])
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {found[2]}")
        if found[1] == "revision":
            return _json({"id": repo, "author": repo.partition("/")[0], "sha": commit, "private": False, "downloads": 0,
                          "likes": 0, "gated": False})  # fmt: skip
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        entries = _tree(repository.commits[commit], f"{found[3]}/" if found[3] else "", recursive)
        if found[3] and not entries:
            return _error(404, "EntryNotFound", f"{found[3]} does not exist")
        return _json(entries)

    def _commit(self, repo: str, revision: str) -> str | None:
        repository = self.repositories.get(repo, Repository())
        revision = urllib.parse.unquote(revision).removeprefix("refs/heads/")
        revision = repository.branches.get(revision, revision)
        return revision if revision in repository.commits else None


def _tree(files: Mapping[str, bytes], prefix: str, recursive: bool) -> list[dict[str, object]]:
    entries: dict[str, dict[str, object]] = {}
    for path, data in files.items():
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            folder = prefix + "/".join(parts[:depth])
            oid = hashlib.sha1(folder.encode()).hexdigest()
            entries.setdefault(folder, {"type": "directory", "oid": oid, "size": 0, "path": folder})
        if recursive or len(parts) == 1:
            entries[path] = {"type": "file", "oid": blob_id(data), "size": len(data), "path": path}
    return list(entries.values())


def _json(document: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps(document).encode()


def _error(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    headers = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
    return status, headers, json.dumps({"error": message}).encode()
