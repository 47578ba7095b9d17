"""What a hub may cost: how long it may keep us waiting, and how much it may send.

A hub, a mirror or a proxy can ask for an hour's patience, send one byte every few seconds, or never stop sending.
Weights take as long as they take and report their progress; everything else is small and ends within `SMALL_SECONDS`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http, parse_ratelimit_headers  # type: ignore[attr-defined]

from shardmill.errors import CheckpointError

log = logging.getLogger(__name__)

BUSY = (429, 500, 502, 503, 504)  # statuses of a hub that may answer otherwise in a moment
_AGAIN = "what was downloaded is kept, run again to resume"
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError, httpx2.InvalidURL)


@contextlib.contextmanager
def explain_http(repo: str, revision: str | None, endpoint: str) -> Iterator[None]:
    """Raise CheckpointError instead of any error of the hub client, the network or the disk."""
    try:
        yield
    except (httpx2.HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{repo}: {_explain(error, repo, revision, endpoint)}") from error


@contextlib.contextmanager
def understood(endpoint: str) -> Iterator[None]:
    """Raise CheckpointError if an answer is not a hub's, such as a sign-in page of the network."""
    try:
        yield
    except HFValidationError:
        raise  # the request was invalid, not the answer
    except _NONSENSE as error:
        raise CheckpointError(
            f"{endpoint} did not answer as a hub does ({type(error).__name__}); "
            "check HF_ENDPOINT, and whether a proxy or a sign-in page stands between"
        ) from error


def _explain(error: Exception, repo: str, revision: str | None, endpoint: str) -> str:
    page = f"{endpoint}/{repo}"
    match error:
        case GatedRepoError() if error.response.status_code == 401:
            return f"gated; accept its licence at {page}, then set HF_TOKEN or run `hf auth login`"
        case GatedRepoError():
            return f"gated, and your token has no access yet; accept its licence at {page} with that account"
        case RevisionNotFoundError():
            return f"has no revision {revision!r}; name a branch, a tag or one of the commits at {page}/commits/main"
        case RepositoryNotFoundError():
            return f"no such model at {endpoint}; check its name, or set HF_TOKEN if it is private"
        case HfHubHTTPError():
            return _explain_status(error.response.status_code, endpoint)
        case LocalEntryNotFoundError(__cause__=Exception() as cause) if not isinstance(cause, OfflineModeIsEnabled):
            return _explain(cause, repo, revision, endpoint)
        case OfflineModeIsEnabled() | LocalEntryNotFoundError():
            lacking = f"files of revision {revision}, or the hub's list of them, by which they are checked"
            return f"the hub cache lacks {lacking}; run once online without HF_HUB_OFFLINE"
        case HFValidationError():
            return "not a repository name; it reads owner/name"
        case httpx2.HTTPError():
            return f"connection to {endpoint} failed ({type(error).__name__}); {_AGAIN}"
        case OSError(errno=errno.ENOSPC):
            return f"disk full; free space or move the cache with HF_HOME; {_AGAIN}"
        case _:
            return f"{' '.join(str(error).split())[:200]}; {_AGAIN}"


def _explain_status(status: int, endpoint: str) -> str:
    if status == 401:
        return f"{endpoint} refused the token (401); set HF_TOKEN to a valid one or run `hf auth login`"
    if status == 403:
        return f"{endpoint} forbids access (403); give the token read rights for this repository"
    return f"{endpoint} answered {status}; {_AGAIN}"


SMALL_SECONDS = 300.0  # for one listing or one text file
# Until a process has its first answer, as long as the hub client waits for one: a network without a way out would keep
# it for minutes.
FIRST_SECONDS = constants.DEFAULT_ETAG_TIMEOUT
FIRST = "HF_HUB_ETAG_TIMEOUT"  # the hub client's own variable, for networks that take longer
SILENCE = 30.0  # seconds without a byte of a listing from a hub that has answered before
READS = ("GET", "HEAD")
LONGEST_WAIT = 60  # seconds that a hub may ask us to wait before a retry
SMALL_BYTES = 64_000_000  # of a listing or a text file; the largest tokenizers in use have 35 MB
MOST_FILES = 20_000  # that a repository may list
TEXT_BYTES = 512_000_000  # of all text files of a repository together

_Result = TypeVar("_Result")


_thread = threading.local()  # of `within`: `late`, set once nobody waits for its work
_answered: set[str] = set()  # hosts that this process has had an answer from
_silent: set[str] = set()  # hosts that gave no first answer: they are not waited for again
_UNASKED = "/api/agent-harnesses"  # the hub's client asks for it unbidden, and needs no answer


class _Client(httpx2.Client):
    """A client that gives up at once if a host can't be reached; the hub client would ask five times, for 50 seconds.

    A host that has answered before is asked again: a long download outlives a moment without a network. The first
    answer of a process must come within FIRST_SECONDS, whatever is slow: a name, a connection (each address of a host
    has a separate timeout), or the host.
    """

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; where it only reads, again if a busy host asks for it, for LONGEST_WAIT seconds in all.

        What writes is not sent again here: a second commit would be another one, and a file that was read to its end
        is put back to its beginning by the hub's client alone.

        Raises CheckpointError if a host that has never answered can't be reached, if it stays busy, or in work that is
        late: its further tries would close connections of others, as the hub client shares them.
        """
        if hasattr(_thread, "late") and _thread.late.is_set():
            raise CheckpointError(f"{request.url.host}: nobody waits for the answer any more")
        waited, begun = 0.0, time.monotonic()
        for attempt in count():
            response = self._once(request, **options)
            if response.status_code not in BUSY or request.method not in READS or request.url.path == _UNASKED:
                return response
            host, wait = request.url.host, _pause(response, attempt)
            response.close()
            waited = max(waited, time.monotonic() - begun)  # a busy host may also take long to say so
            if waited + wait > LONGEST_WAIT:
                raise CheckpointError(
                    f"{host} answered {response.status_code} again and again for {waited:.0f} s; {_AGAIN}"
                )
            if not attempt:
                log.warning(
                    "%s answered %d: it is asked again, for at most %d s", host, response.status_code, LONGEST_WAIT
                )
            time.sleep(wait)
            waited += wait
        raise AssertionError

    def _once(self, request: httpx2.Request, stream: bool = False, **options: Any) -> httpx2.Response:
        limits = dict(request.extensions.get("timeout", {}))
        if request.method in READS and limits.get("read") is None:
            request.extensions["timeout"] = limits | {"connect": SILENCE, "read": SILENCE}
        ask = partial(super().send, request, stream=True, **options)
        try:
            response = ask() if _answered else _first(ask, request.url.host)
        except httpx2.ConnectError as error:
            host = error.request.url.host
            if host in _answered:
                raise
            if _is_unresolved(error):
                why = "this name has no address here; connect to a network, or check HF_ENDPOINT"
            else:
                why = "can't be reached; connect to a network, or check HF_ENDPOINT and the proxy"
            raise CheckpointError(f"{host}: {why}") from error
        _answered.add(response.request.url.host)
        if not stream:
            try:
                response.read()
            finally:
                response.close()
        return response


def _first(ask: Callable[[], _Result], host: str) -> _Result:
    """Return the first answer of this process, without its body. Raises CheckpointError if it does not come soon."""
    seconds = float(os.environ.get(FIRST) or FIRST_SECONDS)
    remedy = f"connect to a network, check HF_ENDPOINT and the proxy, or allow more with {FIRST}=30"
    silence = f"{host}: no answer within {seconds:g} s; {remedy}"
    if host in _silent:
        raise CheckpointError(silence)
    try:
        return within(seconds, ask, host)
    except _Late:
        _silent.add(host)
        raise CheckpointError(silence) from None


def _is_unresolved(error: BaseException | None) -> bool:
    """Return whether an error, or one that it comes from, is a name that can't be resolved."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def client() -> httpx2.Client:
    """Return an HTTP client like the hub client's own, which also refuses long waits and listings without end."""
    hooks: dict[str, list[Callable[..., Any]]] = {
        "request": [_http.hf_request_event_hook],
        "response": [_refuse_long_wait, _limit_listing],
    }
    return _Client(event_hooks=hooks, follow_redirects=True, timeout=None)


def use_client() -> None:
    """Make the hub client use `client` from now on. Old connections stay, because another thread may use them."""
    if _http._GLOBAL_CLIENT_FACTORY is not client:
        set_client_factory(client)


class _Late(CheckpointError):
    """Work took longer than it may."""


def within(seconds: float, work: Callable[[], _Result], what: str) -> _Result:
    """Return what `work` returns; raises CheckpointError, beginning with `what`, if it takes longer than `seconds`.

    No socket timeout does this: each byte of a slow answer restarts the timeout. Late work is left behind in a daemon
    thread, which sends no further request and ends with the process.
    """
    outcome: Future[_Result] = Future()
    late = threading.Event()

    def run() -> None:
        _thread.late = late
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise
        raise _Late(f"{what}: no complete answer within {seconds:.0f} s; run again later") from None
    finally:
        late.set()


class BoundedFile(io.BufferedWriter):
    """A file opened for appending that refuses to grow past `limit` bytes, and hashes the bytes that are written."""

    def __init__(self, path: Path, limit: int, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self.path, self.limit, self.stop = path, limit, stop
        with path.open("rb") as file:  # the bytes that an earlier run left
            self._sha256 = hashlib.file_digest(file, "sha256")
        self._hashed = self.tell()

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Raise CheckpointError before a byte too many is written, InterruptedError once `stop` is set."""
        if self.stop.is_set():
            raise InterruptedError(f"{self.path.name}: stopped, as another file of the checkpoint can't be had")
        at = self.tell()
        if at + len(content) > self.limit:
            raise CheckpointError(f"{self.path.name}: more than the {self.limit} bytes that the hub lists")
        if at == self._hashed:
            self._sha256.update(content)
            self._hashed += len(content)
        else:
            self._hashed = -1  # some bytes were taken out again
        return super().write(content)

    def sha256(self) -> str | None:
        """Return the sha256 of all bytes; None if bytes were removed again, so that the file must be read anew."""
        return self._sha256.hexdigest() if self._hashed == self.tell() else None


@contextlib.contextmanager
def without_pages(name: str, stream: BoundedFile) -> Iterator[None]:
    """Remove a web page that came instead of a file from `stream`; otherwise the next run would resume from it."""
    before = stream.tell()
    try:
        yield
    except (OSError, CheckpointError) as error:
        stream.flush()
        with stream.path.open("rb") as written:
            written.seek(before)
            begins = written.read(256).lstrip()
        other_length = isinstance(error, CheckpointError) or "Consistency check" in str(error)
        if not other_length or not begins.startswith(b"<"):
            raise
        stream.truncate(before)
        raise CheckpointError(
            f"{name}: a web page came in its place; check whether a proxy or a sign-in page stands between, "
            "then run again"
        ) from error


def _refuse_long_wait(response: httpx2.Response) -> None:
    if response.is_error and _wait_asked(response) > LONGEST_WAIT:
        raise CheckpointError(
            f"{response.request.url.host} answered {response.status_code} and asks to wait longer than "
            f"{LONGEST_WAIT} s; run again later, what was transferred is kept"
        )


def _wait_asked(response: httpx2.Response) -> int:
    """Return seconds that the hub client would wait before its next try because the answer says so."""
    quota = parse_ratelimit_headers(response.headers)
    if quota and not quota.remaining:
        return quota.reset_in_seconds
    wait = response.headers.get("Retry-After", "").strip()
    return int(wait) if wait.isdigit() else 0


def _pause(response: httpx2.Response, attempt: int) -> float:
    """Return seconds to wait before the next try: as asked, and one for rounding; else longer from try to try."""
    asked = _wait_asked(response)
    return asked + 1.0 if asked else min(2.0**attempt, 8.0)


class _Limited(httpx2.SyncByteStream):
    """A response's bytes, limited to SMALL_BYTES."""

    def __init__(self, stream: httpx2.SyncByteStream, host: str) -> None:
        self.stream, self.host = stream, host

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        for chunk in self.stream:
            total += len(chunk)
            if total > SMALL_BYTES:
                raise CheckpointError(f"{self.host} sent a listing of more than {SMALL_BYTES} bytes; check HF_ENDPOINT")
            yield chunk

    def close(self) -> None:
        self.stream.close()


def _limit_listing(response: httpx2.Response) -> None:
    if "/api/" in response.request.url.path and isinstance(response.stream, httpx2.SyncByteStream):
        response.stream = _Limited(response.stream, response.request.url.host)
