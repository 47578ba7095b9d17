"""A hub on the loopback interface that repositories can be made on, with what the real huggingface_hub client needs.

Files in large-file storage (LFS) are put one by one and kept whether or not a commit follows, as on the real hub; so an
upload that was broken off can be seen to go on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from checkpoint.hub_server import entry, git_blob_id
from listening import listening
from patience import PATIENCE

LFS = (".safetensors", ".bin", "/data", ".html")


@dataclass
class StoreHub:
    """What the hub holds; tests may change it between requests."""

    endpoint: str = ""
    repos: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)  # (commit, files), newest last
    private: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)  # large files by sha256
    put: list[str] = field(default_factory=list)  # their names, in the order in which they came
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)  # metadata by repository
    stall_at: int | None = None  # the large file, counted from now, at which the answer hangs
    lock: threading.Lock = field(default_factory=threading.Lock)
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    answer: int | None = None  # every answer to a change has this status
    retry_after: str | None = None  # and this header

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes] | None:
        commits = self.repos.get(repo, [])
        found = [files for commit, files in commits if revision in (commit, "main")]
        return found[-1] if found else None

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        listing = json.dumps({name: git_blob_id(content) for name, content in sorted(files.items())})
        commit = hashlib.sha1(f"{len(self.repos.setdefault(repo, []))} {listing}".encode()).hexdigest()
        self.repos[repo].append((commit, files))
        return commit


@contextmanager
def running() -> Iterator[StoreHub]:
    """An empty hub that serves until the block ends."""
    hub = StoreHub()
    with listening(type("Handler", (_Handler,), {"hub": hub}), hub.released.set) as hub.endpoint:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: StoreHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        routes = {
            r"/api/models/(.+?)/tree/([^/]+)": self._tree,
            r"/api/models/(.+?)/revision/([^/]+)": self._info,
            r"/api/models/([^/]+/[^/]+)": self._info,
            r"/(.+?)/resolve/([^/]+)/(.+)": self._resolve,
        }
        self._route(routes)

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.hub.answer is not None:
            wait = self.hub.retry_after
            return self._json({}, self.hub.answer, {"Retry-After": wait} if wait else {})
        routes = {
            r"/api/repos/create": self._create,
            r"/api/validate-yaml": lambda: self._json({"warnings": []}),
            r"/api/models/(.+?)/preupload/main": self._preupload,
            r"/(.+?)\.git/info/lfs/objects/batch": self._batch,
            r"/api/models/(.+?)/commit/main": self._commit,
        }
        return self._route(routes)

    def do_PUT(self) -> None:
        name = self.path.removeprefix("/put/")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == name
        with self.hub.lock:  # so that nothing is kept once an upload is seen to stall
            stalls = self.hub.stall_at is not None and len(self.hub.put) >= self.hub.stall_at
            if not stalls:
                self.hub.blobs[name] = content
                self.hub.put.append(name)
        if not stalls:
            return self._json({})
        self.hub.stalled.set()
        self.hub.released.wait(PATIENCE)

    def _route(self, routes: dict[str, Any]) -> None:
        path = self.path.split("?")[0]
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, path):
                return route(*match.groups())
        return self._json({"error": f"no such address: {path}"}, 404)

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._bytes(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _bytes(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, code: str) -> None:
        self._json({}, 404, {"X-Error-Code": code})

    def _create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.repos:
            return self._json({"url": f"{self.hub.endpoint}/{repo}"}, 409)
        if asked.get("visibility") == "private" or asked.get("private"):
            self.hub.private.add(repo)
        self.hub.commit(repo, {".gitattributes": b"*.bin filter=lfs\n"})
        return self._json({"url": f"{self.hub.endpoint}/{repo}"})

    def _preupload(self, repo: str) -> None:
        there = self.hub.files(repo) or {}
        rows = []
        for file in json.loads(self.body)["files"]:
            name, old = file["path"], there.get(file["path"])
            mode = "lfs" if name.endswith(LFS) else "regular"
            row = {"path": name, "uploadMode": mode, "shouldIgnore": False}
            if old is not None:
                row["oid"] = hashlib.sha256(old).hexdigest() if mode == "lfs" else git_blob_id(old)
            rows.append(row)
        self._json({"files": rows})

    def _batch(self, repo: str) -> None:
        rows = []
        for asked in json.loads(self.body)["objects"]:
            row: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.blobs:
                row["actions"] = {"upload": {"href": f"{self.hub.endpoint}/put/{asked['oid']}"}}
            rows.append(row)
        self._json({"transfer": "basic", "objects": rows})

    def _commit(self, repo: str) -> None:
        files = dict(self.hub.files(repo) or {})
        for line in self.body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif row["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.commit(repo, files)
        self._json({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{commit}", "commitOid": commit})

    def _tree(self, repo: str, revision: str) -> None:
        files = self.hub.files(repo, revision)
        if files is None:
            return self._missing("RevisionNotFound" if repo in self.hub.repos else "RepoNotFound")
        return self._json([entry(name, content, name.endswith(LFS)) for name, content in files.items()])

    def _info(self, repo: str, revision: str = "main") -> None:
        files = self.hub.files(repo, revision)
        if files is None:
            return self._missing("RevisionNotFound" if repo in self.hub.repos else "RepoNotFound")
        newest = self.hub.repos[repo][-1][0]
        body = {"id": repo, "sha": newest if revision == "main" else revision, "private": repo in self.hub.private}
        body["siblings"] = [{"rfilename": name} for name in files]
        return self._json(body | ({"cardData": self.hub.cards[repo]} if repo in self.hub.cards else {}))

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        content = (self.hub.files(repo, revision) or {}).get(name)
        if content is None:
            return self._missing("EntryNotFound")
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        etag = hashlib.sha256(content).hexdigest() if name.endswith(LFS) else git_blob_id(content)
        headers = {"X-Repo-Commit": revision, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        return self._bytes(content[start:], 206 if start else 200, headers)
