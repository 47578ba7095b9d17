"""The portable engine under the name that shardmill's users know: `shardmill.portable.install(precision=...)`.

The engine is a separate distribution, portable-coreml, which does not depend on shardmill.
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
