"""A full disk is told from other errors, however a library wraps it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from shardmill.errors import ShardmillError
from shardmill.pipeline.job import error_line, full_at, uncopied_at

FULL = os.strerror(errno.ENOSPC)


def wrapped(inner: Exception, *, hidden: bool = False) -> Exception:
    """A ShardmillError raised from `inner`, or while it was handled."""
    try:
        try:
            raise inner
        except Exception as error:
            raise ShardmillError("a.mlmodelc can't be loaded") from (None if hidden else error)
    except ShardmillError as error:
        return error


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (OSError(errno.ENOSPC, FULL), "build"),
        (OSError(errno.ENOSPC, FULL, "build/x"), "build/x"),
        (OSError(errno.ENOSPC, FULL, "build/x", None, "build/y"), "build/y"),
        (shutil.Error([("/tmp/a", "build/b", f"[Errno 28] {FULL}: 'build/b'")]), "build/b"),
        (SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)"), "build"),
        (wrapped(OSError(errno.ENOSPC, FULL, "build/x")), "build/x"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "build/x"), "build/x"),
        (wrapped(OSError(errno.ENOSPC, FULL, "build/x"), hidden=True), "build/x"),
    ],
)
def test_it_is_found_with_what_could_not_be_written(error: Exception, where: str) -> None:
    assert full_at(error) == where


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the context is full"),
        OSError(errno.EACCES, os.strerror(errno.EACCES), "build/x"),
        shutil.Error([("a", "b", "[Errno 13] Permission denied")]),
        shutil.Error("same file"),
        wrapped(ValueError("damaged")),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert full_at(error) is None


def test_a_copy_that_a_library_in_c_could_not_end_is_named() -> None:
    """coremltools makes packages with C++, to which a full disk is an I/O error."""
    said = "filesystem error: cannot copy: Input/output error [/tmp/a.mlmodel] [build/.store/tmp-1/a b.mlmodel]"
    error = wrapped(RuntimeError(said))
    assert full_at(error) is None and uncopied_at(error) == "build/.store/tmp-1/a b.mlmodel"
    line = error_line(RuntimeError(said), Path("log"))
    assert line.startswith("build/.store/tmp-1/a b.mlmodel: the disk is full, or fails; free some space")
    assert uncopied_at(RuntimeError(said.replace("Input/output error", "No such file or directory"))) is None


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = ValueError("round and round")
    error.__cause__ = error
    assert full_at(error) is None
