"""A model hub on the loopback interface, with as much of the protocol as the real huggingface_hub client needs.

It serves one repository at one commit, logs every request, and misbehaves on demand. What it answers follows
what the client reads: X-Repo-Commit, ETag, X-Linked-Etag, X-Linked-Size, X-Error-Code, redirects, ranges.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from listening import listening
from patience import PATIENCE

REPO = "acme/tiny"
COMMIT = "c0ffee" + "0" * 34
PAUSE = 0.05  # seconds between the pieces of a slow answer


@dataclass
class Request:
    """One request as the server saw it; `sent` counts the body's bytes."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent: int = 0


@dataclass
class Hub:
    """What the hub holds and how it misbehaves; tests change it between requests."""

    files: dict[str, bytes]
    endpoint: str = ""
    repo: str = REPO
    lfs_suffixes: tuple[str, ...] = (".safetensors", ".bin")
    requests: list[Request] = field(default_factory=list)
    drop_after: dict[str, int] = field(default_factory=dict)  # file -> bytes after which one answer breaks off
    stall_after: dict[str, int] = field(default_factory=dict)  # file -> bytes after which the answer hangs
    rates: dict[str, float] = field(default_factory=dict)  # file -> bytes a second of each of its answers
    served: dict[str, bytes] = field(default_factory=dict)  # file -> other bytes than the listing promises
    etags: dict[str, str] = field(default_factory=dict)  # file -> the ETag that it is answered with
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # file -> what its row of the listing says instead
    listing: bytes | None = None  # instead of the listing
    dripping: str = ""  # the path whose answer comes a byte at a time
    retry_after: str | None = None  # every answer is a 429 that asks to wait
    statuses: list[int] = field(default_factory=list)  # of the next answers, before it answers again
    renamed: str = ""  # the name that REPO goes by now
    commit: str = COMMIT  # of the main branch; every commit holds the same files
    gated_status: int | None = None
    token: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def is_lfs(self, name: str) -> bool:
        return name.endswith(self.lfs_suffixes)

    def downloads(self, name: str) -> list[Request]:
        """The requests that asked for the bytes of a file."""
        target = f"/cdn/{name}" if self.is_lfs(name) else f"/{self.repo}/resolve/{COMMIT}/{name}"
        return [r for r in self.requests if r.method == "GET" and r.path == target]


def entry(name: str, content: bytes, lfs: bool) -> dict[str, Any]:
    """One row of the hub's tree listing."""
    row: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_blob_id(content)}
    if lfs:
        sha = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(content)}\n".encode()
        row |= {"oid": git_blob_id(pointer), "lfs": {"oid": sha, "size": len(content), "pointerSize": len(pointer)}}
    return row


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serves `files` as REPO, or as what the test calls it, at COMMIT until the block ends."""
    hub = Hub(files)
    with listening(type("Handler", (_Handler,), {"hub": hub}), hub.released.set) as hub.endpoint:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass  # the log is `hub.requests`

    def do_HEAD(self) -> None:
        self.do_GET()

    do_POST = do_PUT = do_HEAD

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.seen = Request(self.command, path, self.headers.get("Range"), token)
        self.hub.requests.append(self.seen)
        if self.hub.retry_after is not None:
            return self._answer(429, b"", {"Retry-After": self.hub.retry_after})
        if self.hub.statuses:
            return self._answer(self.hub.statuses.pop(0), b"", {})
        routes = (
            (r"/api/models/(.+?)/tree/([^/]+)", self._tree),
            (r"/api/models/(.+?)/revision/([^/]+)", self._info),
            (r"/api/models/([^/]+/[^/]+)", self._info),
            (r"/(.+?)/resolve/([^/]+)/(.+)", self._resolve),
            (r"/cdn/(.+)", self._cdn),
        )
        for pattern, route in routes:
            if match := re.fullmatch(pattern, path):
                return route(*match.groups())
        return self._answer(404, b"", {})

    def _refused(self, repo: str, revision: str) -> bool:
        if self.hub.token and self.seen.token not in (None, self.hub.token):
            message = "Invalid credentials in Authorization header"
            self._answer(401, b"", {"X-Error-Message": message})
        elif repo != self.hub.repo:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (COMMIT, self.hub.commit, "main"):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _tree(self, repo: str, revision: str) -> None:
        if not self._refused(repo, revision):
            files = self.hub.files.items()
            rows = [entry(name, body, self.hub.is_lfs(name)) | self.hub.rows.get(name, {}) for name, body in files]
            body = json.dumps(rows).encode() if self.hub.listing is None else self.hub.listing
            self._answer(200, body, {"Content-Type": "application/json"})

    def _info(self, repo: str, revision: str = "main") -> None:
        if not self._refused(repo, revision):
            body = {
                "id": self.hub.renamed or self.hub.repo,
                "sha": self.hub.commit,
                "siblings": [{"rfilename": name} for name in self.hub.files],
            }
            self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if self._refused(repo, revision):
            return
        if self.hub.gated_status:
            self._answer(self.hub.gated_status, b"", {"X-Error-Code": "GatedRepo"})
        elif name not in self.hub.files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif self.hub.is_lfs(name):
            body = self.hub.files[name]
            etag = self.hub.etags.get(name, hashlib.sha256(body).hexdigest())
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(body))}
            # Another host name, as the hub's: the client follows it for a GET only, and leaves the token behind.
            location = self.hub.endpoint.replace("127.0.0.1", "localhost") + f"/cdn/{name}"
            self._answer(302, b"", {"X-Repo-Commit": revision, "Location": location, **linked})
        else:
            etag = self.hub.etags.get(name, git_blob_id(self.hub.files[name]))
            body = self.hub.served.get(name, self.hub.files[name])
            self._answer(200, body, {"X-Repo-Commit": revision, "ETag": f'"{etag}"'})

    def _cdn(self, name: str) -> None:
        body = self.hub.served.get(name, self.hub.files[name])
        headers = {"Accept-Ranges": "bytes"}
        if not self.seen.range:
            return self._answer(200, body, headers, name)
        start = int(self.seen.range.removeprefix("bytes=").split("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return self._answer(206, body[start:], headers, name)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        drop, stall = self.hub.drop_after.pop(name, None), self.hub.stall_after.pop(name, None)
        limit = drop or stall
        self._send(body if limit is None else body[:limit], self.hub.rates.get(name))
        if limit is not None:
            self.close_connection = True  # the client was promised more
        if stall is not None:
            self.hub.stalled.set()
            self.hub.released.wait(PATIENCE)

    def _send(self, body: bytes, rate: float | None = None) -> None:
        dripping = self.seen.path == self.hub.dripping
        size = 1 if dripping else max(1, int(rate * PAUSE)) if rate else max(1, len(body))
        try:
            for start in range(0, len(body), size):
                piece = memoryview(body)[start : start + size]
                self.wfile.write(piece)
                self.wfile.flush()
                self.seen.sent += len(piece)
                if (dripping or rate) and self.hub.released.wait(PAUSE):
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client was killed
