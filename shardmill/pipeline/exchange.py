"""What the store on this machine takes from the one that machines share, and gives to it; neither can fail a build."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

from shardmill.pipeline import blobs, remote
from shardmill.pipeline.remote import Refused, Remote
from shardmill.pipeline.task import Work

log = logging.getLogger(__name__)
MARK = ".remote-silent"  # in the store here: when a job last waited for the other in vain
LONG = 5.0  # seconds without an answer
PAUSE = 300.0  # seconds in which nobody asks again: a build may have a thousand jobs


class Answer(Enum):
    """What became of a question for an entry."""

    UNASKED = "there is no such store, or the entry was here"
    TAKEN = "the entry is here now"
    NONE = "it has no such entry"
    REFUSED = "it has one that is not what it should be"
    SILENT = "it could not be asked"


def ask(shared: Remote | None, entry: Path, fill: Callable[[Work], None]) -> Answer:
    """Looks for an entry and takes it.

    Args:
        shared: the store, if there is one.
        entry: the folder that it is to be here.
        fill: keeps as the entry what a work makes.
    """
    if shared is None:
        return Answer.UNASKED
    key, pool, mark = entry.name, entry.parent / blobs.FOLDER, entry.parent / MARK
    if 0 <= (ago := time.time() - _written(mark)) < PAUSE:
        log.info("remote store: not asked, as it was silent %.0f s ago", ago)
        return Answer.SILENT
    began = time.monotonic()
    try:
        files = remote.find(shared, key)
        if files is None:
            return Answer.NONE
        fill(lambda made: remote.bring(shared, files, made, pool))
    except Refused as error:
        log.warning("remote store: entry %s refused: %s; made here instead", key[:12], error)
        return Answer.REFUSED
    except Exception as error:  # whatever a file system raises: the work can be done here
        log.warning("remote store: entry %s can't be had: %s; made here instead", key[:12], remote.why(error))
        if time.monotonic() - began > LONG and _is_timeout(error):
            with contextlib.suppress(OSError):  # another user's store
                mark.touch()
        return Answer.SILENT
    log.info("taken from the remote store")
    return Answer.TAKEN


def _is_timeout(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is a timeout; each library has its own class for that."""
    while error is not None:
        if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _written(file: Path) -> float:
    """When a file was written last; long ago if there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def offer(shared: Remote | None, entry: Path, files: Mapping[str, str], answer: Answer) -> None:
    """Sends an entry that was made here.

    Args:
        shared: the store.
        entry: the entry's folder.
        files: path in it -> sha256.
        answer: what became of the question for it; who could not be asked is not told.
    """
    if shared is None or not shared.writable or answer is Answer.SILENT:
        return
    try:
        remote.keep(shared, entry.name, entry, files, anew=answer is Answer.REFUSED)
    except Exception as error:  # the build has what it needs
        log.warning("remote store: entry %s was not sent: %s", entry.name[:12], remote.why(error))
