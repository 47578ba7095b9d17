"""Remembers what source files are: every process of a build asks for that, and parsing them all takes seconds.

It is kept beside Python's own compiled modules. A file's entry counts while the file holds the very bytes that were
parsed, and was parsed by the code that is here now. Losing it costs time, never truth.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import asdict
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from shardmill.files import load_json, write_json
from shardmill.pipeline import source_file
from shardmill.pipeline.source_file import Module, data_of, module_name, parsed

KEPT = Path(cache_from_source(__file__)).with_suffix(".json")
READER = hashlib.sha256(Path(source_file.__file__).read_bytes()).hexdigest()

_new: dict[str, dict[str, Any]] = {}  # what this process parsed


@cache
def read_module(file: Path) -> Module:
    """Return what a source file imports and its digest; parses it only if its bytes are new."""
    source, data = file.read_bytes(), data_of(file)
    name = "/".join(module_name(file))
    sha256 = hashlib.sha256(len(source).to_bytes(8) + source + data).hexdigest()
    entry = _kept().get(name, {})
    try:
        if entry["sha256"] == sha256:
            return Module(entry["code"], tuple(entry["imported"]))
    except (KeyError, TypeError):  # not kept, or damaged
        pass
    module = parsed(file, source, data)
    _new[name] = {"sha256": sha256, **asdict(module)}
    return module


def keep() -> None:
    """Writes what this process parsed beside what was kept before; not where that folder may only be read."""
    if _new:
        with contextlib.suppress(OSError):
            write_json(KEPT, {"reader": READER, "modules": _kept() | _new})
        _new.clear()
        _kept.cache_clear()


@cache
def _kept() -> dict[str, Any]:
    """The entries by name; none where there is no file yet, or one that is damaged or of another reader."""
    with contextlib.suppress(OSError, ValueError):
        content = load_json(KEPT)
        modules = content.get("modules") if isinstance(content, dict) and content.get("reader") == READER else None
        return modules if isinstance(modules, dict) else {}
    return {}
