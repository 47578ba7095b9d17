"""Hosts of models that have what a test needs, and nothing else."""

from __future__ import annotations

from typing import Any

from shardmill.models.contract import BLOCK
from shardmill.runtime.kv import KVLayout


def host(slots: int = 48, window: int | None = None, taps: int = 0, ring: int = 0, **tables: Any) -> KVLayout:
    """A host of a model with this context, window, taps, ring for the window, and rotary tables."""
    return KVLayout({"context": slots, "rope": tables, "window": window, "window_slots": ring, "conv_taps": taps})


def recurrent(slots: int = 104, taps: int = 4, **narrow: int) -> KVLayout:
    """A host of a model that has recurrences only."""
    runtime = {"context": slots, "rope": {}, "window": None, "window_slots": 0, "conv_taps": 0}
    return KVLayout(runtime | {"recurrent": {"block": BLOCK, "taps": taps, **narrow}})
