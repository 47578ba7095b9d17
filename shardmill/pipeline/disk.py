"""Tells a full disk, or a quota that is used up, from other errors.

Libraries wrap what the system says, some into nothing but text.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

CODES = (errno.ENOSPC, errno.EDQUOT)
# The second of each is Rust's, as safetensors reports it.
SIGNS = tuple(sign for code in CODES for sign in (os.strerror(code), f"os error {code})"))
UNCOPIED = re.compile(rf"filesystem error: cannot copy: {re.escape(os.strerror(errno.EIO))} \[[^]]*\] \[([^]]*)\]")
SOMEWHERE = "build"


def full_at(error: BaseException) -> str | None:
    """What could not be written as the disk is full, "build" where the error does not say; None for another error."""
    for found in chain(error):
        if isinstance(found, OSError) and found.errno in CODES:
            return str(found.filename2 or found.filename or SOMEWHERE)
        if any(sign in str(found) for sign in SIGNS):
            return _copied_to(found) or SOMEWHERE
    return None


def uncopied_at(error: BaseException) -> str | None:
    """What a library in C++ could not write; None for another error.

    The standard library of C++ makes an I/O error of a full disk, as of one that fails, so no more is known.
    """
    found = next((found for each in chain(error) if (found := UNCOPIED.search(str(each)))), None)
    return found and found[1]


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = following.__cause__ or following.__context__


def _copied_to(error: BaseException) -> str | None:
    """The file at which shutil.copytree first failed: its error holds (source, target, reason) of each."""
    first = error.args[0][0] if error.args and isinstance(error.args[0], list) and error.args[0] else None
    return str(first[1]) if isinstance(first, tuple) and len(first) == 3 else None
