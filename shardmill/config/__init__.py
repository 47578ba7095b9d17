"""configs/*.yaml -> validated, frozen dataclasses.

Whatever can be known to be wrong is wrong here, in one line that names the file, the key and the remedy, before any
work starts. Keys that do not exist are errors. configs/schema.json is this package's schema, for editors.
"""

from shardmill.config.model import (
    DRAFTERS,
    Benchmark,
    Budget,
    Calibration,
    Config,
    Convert,
    Head,
    Parity,
    Search,
    Source,
    Tokens,
)
from shardmill.config.reading import config_of, find_config, load, parse, schema

__all__ = [
    "DRAFTERS",
    "Benchmark",
    "Budget",
    "Calibration",
    "Config",
    "Convert",
    "Head",
    "Parity",
    "Search",
    "Source",
    "Tokens",
    "config_of",
    "find_config",
    "load",
    "parse",
    "schema",
]
