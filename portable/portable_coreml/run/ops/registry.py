"""The kernel table.

Operation type -> a function over torch tensors whose parameters are the operation's MIL arguments.

A kernel's annotations say how each argument reaches it:
- `Tensor`: a torch tensor, constant or not.
- `Tensors`: a list argument (concat's `values`).
- `Elements`: a value that is itself a list of tensors. A kernel that gives such a list returns it in a tuple of one.
- `int`, `float`, `bool`, `str`, `Ints`, `Bools`, `Pairs`: a plain value. If the program computes it at run time,
  the planner converts it, and knows that the result's shape now depends on data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
Tensors = Sequence[Tensor]
Elements = tuple[Tensor, ...]
Ints = Sequence[int]
Bools = Sequence[bool]
Pairs = Sequence[Sequence[int]]
_Kinds = {
    Tensor: "tensor",
    Tensors: "tensors",
    Elements: "tensor",
    int: "plain",
    float: "plain",
    bool: "plain",
    str: "plain",
    Ints: "plain",
    Bools: "plain",
    Pairs: "plain",
    Tensor | None: "tensor",
    int | None: "plain",
    float | None: "plain",
    Ints | None: "plain",
    Bools | None: "plain",
    bool | None: "plain",
}


@dataclass(frozen=True)
class Param:
    """One argument of a kernel.

    `kind` is tensor, tensors or plain; `default` is inspect.Parameter.empty if required.
    """

    name: str
    kind: str
    default: Any


@dataclass(frozen=True)
class Kernel:
    """How to compute one operation type.

    `exact`: the results are copies of inputs, so there is nothing to round. `data_shape`: the shape of the result
    depends on data even when every plain argument is constant. `shape_only`: the result depends on its inputs'
    shapes alone. `impure`: every call may give something else, so that constants don't make it one. `grows`: plain
    arguments decide how large the result is.
    """

    kind: str
    call: Callable[..., Any]
    params: tuple[Param, ...]
    exact: bool = False
    data_shape: bool = False
    shape_only: bool = False
    impure: bool = False
    grows: bool = False


KERNELS: dict[str, Kernel] = {}
_EXTRA = "portable_coreml_extra"


def find_kernel(kind: str) -> Kernel | None:
    """Return the kernel of an operation type; None if neither this package nor portable_coreml_extra has one."""
    if kind not in KERNELS:
        extra_package()
    return KERNELS.get(kind)


@cache
def extra_package() -> Any:
    """Return the package portable_coreml_extra, whose import registers more kernels; None if it is not installed."""
    try:
        return import_module(_EXTRA)
    except ModuleNotFoundError as error:
        if error.name != _EXTRA:
            raise
        return None


def kernel(
    *kinds: str,
    exact: bool = False,
    data_shape: bool = False,
    shape_only: bool = False,
    impure: bool = False,
    grows: bool = False,
) -> Callable[[F], F]:
    """Register a function as the kernel of the named operation types."""

    def register(call: F) -> F:
        params = _params(call)
        for kind in kinds:
            KERNELS[kind] = Kernel(kind, call, params, exact, data_shape, shape_only, impure, grows)
        return call

    return register


def elementwise(table: dict[str, Callable[..., Any]], *names: str, exact: bool = False) -> None:
    """Register functions of tensors alone (torch's own, mostly) under the given parameter names."""
    params = tuple(Param(name, "tensor", inspect.Parameter.empty) for name in names)
    for kind, call in table.items():
        KERNELS[kind] = Kernel(kind, call, params, exact)


def _params(call: Callable[..., Any]) -> tuple[Param, ...]:
    hints = get_type_hints(call)
    parameters = inspect.signature(call).parameters.values()
    return tuple(Param(p.name, _Kinds[hints[p.name]], p.default) for p in parameters)
