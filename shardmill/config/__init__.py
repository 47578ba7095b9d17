"""configs/*.yaml -> validated, frozen dataclasses.

Whatever can be known to be wrong is wrong here, in one line that names the file, the key and the remedy, before any
work starts. Keys that do not exist are errors. configs/schema.json is this package's schema, for editors.
"""

from shardmill.config.convert import Budget, Calibration, Convert, Search
from shardmill.config.model import Config
from shardmill.config.reading import checked, find, load, parse, schema
from shardmill.config.sections import DRAFTERS, Benchmark, Head, Parity, Source, Tokens

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
    "checked",
    "find",
    "load",
    "parse",
    "schema",
]
