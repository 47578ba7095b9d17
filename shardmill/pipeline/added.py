"""What signing and publishing add to a build, and what a published build may lack.

bundle.json and attestations/card.json name what was added. Whatever they say, only what a reader can do without may be
missing: the checkpoint's weights, the reference's states, and one of the two forms of the programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.files import read_sealed
from shardmill.pipeline.task import SOURCE

BUNDLE = "bundle.json"
CARD_RECORD = "attestations/card.json"
SIGNATURES = re.compile(r"model\.sig|attestations/(provenance|test-results|rebuild-[0-9a-f]{16})\.dsse\.jsonl")
STATES = ("reference.safetensors", "measured/original.safetensors")  # of the original, made again from the checkpoint
PROGRAMS = {"packages": "compiled/", "compiled": "packages/"}  # by what is included, the folder that is not


def added(build: Path) -> dict[str, Any]:
    """bundle.json's content; where there is none, nothing was added. Raises ShardmillError where it is damaged."""
    nothing: dict[str, Any] = {"include": "both", "files": {}, "left_out": []}
    content = _record(build / BUNDLE) if (build / BUNDLE).exists() else nothing
    whole = isinstance(content.get("left_out"), list) and content.get("include") in ("both", *PROGRAMS)
    if not whole or not all(may_be_absent(str(name), content["include"]) for name in content["left_out"]):
        raise ShardmillError(f"{build / BUNDLE}: leaves out what must be there; remove it and sign or publish again")
    return content


def card(build: Path) -> dict[str, Any]:
    """attestations/card.json's content; where there is none, there is no card."""
    return _record(build / CARD_RECORD) if (build / CARD_RECORD).exists() else {"files": {}}


def _record(path: Path) -> dict[str, Any]:
    content = read_sealed(path)
    if not isinstance(content.get("files"), Mapping):
        raise ShardmillError(f"{path}: no record of added files; remove it and sign or publish again")
    return content


def is_signature(name: str) -> bool:
    """Whether a path is that of a signature, which is checked with a key and not by its hash."""
    return SIGNATURES.fullmatch(name) is not None


def may_be_absent(name: str, include: str) -> bool:
    """Whether a published build may lack a file that its records name."""
    weights = name.startswith(f"{SOURCE}/") and name.endswith(".safetensors")
    other = PROGRAMS.get(include)
    return weights or name in STATES or (other is not None and name.startswith(other))
