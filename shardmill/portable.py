"""The portable engine under the name that shardmill's users know: `shardmill.portable.install(precision=...)`.

It is a distribution of its own, portable-coreml, which depends on nothing here.
"""

from portable_coreml import (
    ExecutionError,
    FirstNonFinite,
    InputError,
    NonFinite,
    PortableError,
    ProgramError,
    UnsupportedOp,
    install,
    precision,
    trace,
)

__all__ = [
    "ExecutionError",
    "FirstNonFinite",
    "InputError",
    "NonFinite",
    "PortableError",
    "ProgramError",
    "UnsupportedOp",
    "install",
    "precision",
    "trace",
]
