"""Does anything that is to be published name the machine that it was made on?"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.pipeline.task import SOURCE
from shardmill.printable import one_line

# Names that many machines and users have tell nobody anything, and are words besides.
COMMON = {"root", "user", "users", "admin", "runner", "ubuntu", "debian", "localhost", "builder", "build", "test"}
WEIGHTS = (".bin", ".safetensors")
HOST, ACCOUNT = "this machine", "your account"
SHORTEST = 4  # a shorter name is found everywhere
# Addresses, whose owner may be called like an account.
PUBLIC = re.compile(r"\b(?:(?:git\+)?https://|hf:|pkg:)[^\s\"'<>)]+")
AROUND = 24  # characters of a file that an error shows on either side


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
            text = PUBLIC.sub(" ", content) if what == ACCOUNT else content
            if found := pattern.search(text):
                where = one_line(text[max(0, found.start() - AROUND) : found.end() + AROUND])
                raise ShardmillError(
                    f"{build / name}: names {what}: ...{where}...; give the config a path or a text without it "
                    "(paths may be relative to the project), and build again"
                )


def _names(build: Path) -> dict[str, re.Pattern[str]]:
    """What must not be found, and how it is looked for."""
    places = {"this machine's folder": Path.cwd(), "the build's folder": build.resolve(), "your home": Path.home()}
    found = {
        what: re.compile(re.escape(str(place)) + r"(?![\w-])") for what, place in places.items() if place != Path("/")
    }
    for what, name, form in _people():
        if len(name) >= SHORTEST and name.lower() not in COMMON | {build.name}:
            found[what] = re.compile(form.format(re.escape(name)))
    return found


def _people() -> Iterator[tuple[str, str, str]]:
    """Yield what a name is of, the name, and a regular expression for where it is a name and not a word.

    A host `model` or an account `coreml` is a word of every build. So a host is looked for where an address has it, and
    anywhere only if it is no plain word; an account in paths and in addresses.
    """
    host = socket.gethostname()
    is_word = re.fullmatch(r"\w+", host)
    yield HOST, host, r"(?:(?<=@)|(?<=//)){}(?![\w-])" if is_word else r"(?<![\w.-]){}(?![\w-])"
    try:
        yield ACCOUNT, getpass.getuser(), r"(?<=[/\\~]){0}(?![\w.-])|(?<![\w.-]){0}(?=@\w)"
    except (KeyError, OSError):  # an account without a name
        return
