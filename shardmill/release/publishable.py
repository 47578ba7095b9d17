"""Checks before publishing: the license must allow it, and no file may name a host or an account."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.printable import one_line
from shardmill.records.names import SOURCE

# Names that many machines and users share identify nobody, and are also plain words.
COMMON = {"root", "user", "users", "admin", "runner", "ubuntu", "debian", "localhost", "builder", "build", "test"}
WEIGHTS = (".bin", ".safetensors")
HOST, ACCOUNT = "this machine", "your account"
SHORTEST = 4  # characters; a shorter name occurs in almost any text
# Public addresses, whose owner may have the same name as the account.
PUBLIC = re.compile(r"\b(?:(?:git\+)?https://|hf:|pkg:)[^\s\"'<>)]+")
AROUND = 24  # characters of a file that an error shows on either side


def check_leaks(build: Path, files: Iterable[str]) -> None:
    """Raise ShardmillError if a file to publish names this machine, its folders or its user.

    The checkpoint's own files are public, so they are skipped.
    """
    told = _names(build)
    for name in files:
        if name.endswith(WEIGHTS) or name.startswith(f"{SOURCE}/") or (build / SOURCE / name).exists():
            continue
        content = (build / name).read_text(encoding="utf-8", errors="replace")
        for what, pattern in told.items():
            text = PUBLIC.sub(" ", content) if what == ACCOUNT else content
            if match := pattern.search(text):
                where = one_line(text[max(0, match.start() - AROUND) : match.end() + AROUND])
                raise ShardmillError(
                    f"{build / name}: names {what}: ...{where}...; give the config a path or a text without it "
                    "(paths may be relative to the project), and build again"
                )


def _names(build: Path) -> dict[str, re.Pattern[str]]:
    """Return a regular expression for each name that must not be published, by description."""
    places = {"this machine's folder": Path.cwd(), "the build's folder": build.resolve(), "your home": Path.home()}
    patterns = {
        what: re.compile(re.escape(str(place)) + r"(?![\w-])") for what, place in places.items() if place != Path("/")
    }
    for what, name, form in _people():
        if len(name) >= SHORTEST and name.lower() not in COMMON | {build.name}:
            patterns[what] = re.compile(form.format(re.escape(name)))
    return patterns


def _people() -> Iterator[tuple[str, str, str]]:
    """Yield (description, name, pattern) of host and account; a pattern matches names and not plain words.

    A host may be called `model` and an account `coreml`, which are words in every build. So a host whose name is a
    plain word matches only in addresses, and any other host everywhere. An account matches in paths and addresses.
    """
    host = socket.gethostname()
    is_word = re.fullmatch(r"\w+", host)
    yield HOST, host, r"(?:(?<=@)|(?<=//)){}(?![\w-])" if is_word else r"(?<![\w.-]){}(?![\w-])"
    try:
        yield ACCOUNT, getpass.getuser(), r"(?<=[/\\~]){0}(?![\w.-])|(?<![\w.-]){0}(?=@\w)"
    except (KeyError, OSError):  # an account without a name
        return


# Licenses that allow changed copies, some under conditions, which the card repeats by linking the license.
ALLOWING = re.compile(
    r"apache-2\.0|mit|mit-0|bsd.*|isc|unlicense|cc0-1\.0|cc-by-4\.0|cc-by-3\.0|cc-by-2\.0|cc-by-sa-[234]\.0|cc-by-nc(-sa)?-[234]\.0"
    r"|openrail(\+\+)?|bigscience-.*|creativeml-openrail-m|psf-2\.0|python-2\.0|zlib|wtfpl|0bsd|odc-by|pddl|mpl-2\.0"
    r"|a?gpl-[23]\.0|lgpl.*|llama[234].*|gemma|deepseek|lfm1\.0|modified-mit|afl-3\.0|artistic-2\.0|ecl-2\.0|epl-[12]\.0"
)
FORBIDDING = re.compile(r".*-nd(-.*)?|other-no-derivatives|proprietary|all-rights-reserved")


@dataclass(frozen=True)
class License:
    """A license in a card: the hub's identifier and, if the identifier is `other`, its name and address."""

    id: str
    name: str | None = None
    link: str | None = None


def check_license(license: License | None, may: bool) -> License:
    """Return the checkpoint's license, under which a build may be published.

    If `may`, the user takes responsibility for the license.

    Raises:
        ShardmillError: the license is not known, forbids changed copies, or is not known to allow changed copies.
    """
    if license is None:
        raise ShardmillError("the checkpoint's license is not known; say it with --license, e.g. --license apache-2.0")
    if may or ALLOWING.fullmatch(license.id):
        return license
    if FORBIDDING.fullmatch(license.id):
        raise ShardmillError(f"license {license.id} forbids to publish changed copies; --i-may if you have permission")
    raise ShardmillError(f"license {license.id} is not known to allow changed copies; read it, then --i-may")


def license_of(repo: str, commit: str) -> License | None:
    """Return the license in the card of a hub repository; None if it is not stated. Raises CheckpointError."""
    from shardmill.checkpoint.hub_limits import SMALL_SECONDS, explain_http, understood, within
    from shardmill.checkpoint.hub_listing import HubAccess

    access = HubAccess()
    with explain_http(repo, commit, access.endpoint), understood(access.endpoint):
        asked = partial(access.api.model_info, repo, revision=commit)
        card = within(SMALL_SECONDS, asked, access.endpoint).card_data
    if card is None or not card.license:
        return None
    ids = card.license if isinstance(card.license, list) else [card.license]
    return License(str(ids[0]), card.license_name, card.license_link)
