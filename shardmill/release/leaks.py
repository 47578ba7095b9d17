"""Does anything that is to be published name the machine that it was made on?"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.pipeline.task import SOURCE

# Names that many machines and users have tell nobody anything, and are words besides.
COMMON = {"root", "user", "users", "admin", "runner", "ubuntu", "debian", "localhost", "builder", "build", "test"}
WEIGHTS = (".bin", ".safetensors")
SHORTEST = 4  # a shorter name is found everywhere


def check_leaks(build: Path, files: Iterable[str]) -> None:
    """Raises ShardmillError, naming the file and what it tells, where one names this machine.

    Args:
        build: the build's folder.
        files: what of it is to be published; the checkpoint's own files, which are public, are not looked at.
    """
    told = _names(build)
    for name in files:
        if name.endswith(WEIGHTS) or name.startswith(f"{SOURCE}/") or (build / SOURCE / name).exists():
            continue
        content = (build / name).read_text(encoding="utf-8", errors="replace")
        for what, pattern in told.items():
            if pattern.search(content):
                raise ShardmillError(f"{build / name}: names {what}; take it out of the config and build again")


def _names(build: Path) -> dict[str, re.Pattern[str]]:
    """What must not be found, and how it is looked for."""
    places = {"this machine's folder": Path.cwd(), "the build's folder": build.resolve(), "your home": Path.home()}
    found = {
        what: re.compile(re.escape(str(place)) + r"(?![\w-])") for what, place in places.items() if place != Path("/")
    }
    for what, name in _people():
        if len(name) >= SHORTEST and name.lower() not in COMMON | {build.name}:
            found[what] = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
    return found


def _people() -> Iterator[tuple[str, str]]:
    yield "this machine", socket.gethostname()
    try:
        yield "your account", getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        return
