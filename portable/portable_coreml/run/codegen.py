"""Turns the lines of a plan into one Python function without branches, lookups or bookkeeping.

A line is one call; values are local variables, constants are globals of the generated function, and a value is
deleted after its last use. The generated source mentions only names made here (v0, c0, f0, ...), never text from
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from portable_coreml.run.lowered import Arg, Const, Ref, last_mentions, used


@dataclass(frozen=True, eq=False)
class CodeLine:
    """One statement: `targets = call(*args)`.

    With `state`, an access of that state: a write if there is an argument, through `call` if given. `post`: applied
    to the single result. `tupled`: the call returns a tuple. `plain`: positions of arguments to convert to Python
    values. `needs_states`: the states dictionary is the first argument.
    """

    targets: tuple[str, ...]
    call: Callable[..., Any] | None
    args: tuple[Arg, ...]
    post: tuple[Callable[[Tensor], Tensor] | None, ...] = ()
    tupled: bool = False
    plain: frozenset[int] = frozenset()
    state: str | None = None
    needs_states: bool = False


class _Source:
    """The text being generated and the globals it uses."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.globals: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.body: list[str] = []
        self.known: dict[int, str] = {}
        for name in inputs:
            self.variable(name)

    def variable(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def bind(self, value: Any) -> str:
        """Return a global name for a callable or constant."""
        if id(value) not in self.known:
            self.known[id(value)] = f"g{len(self.known)}"
            self.globals[self.known[id(value)]] = value
        return self.known[id(value)]

    def expression(self, arg: Arg, plain: bool = False) -> str:
        if isinstance(arg, Ref):
            return f"{self.variable(arg.name)}.tolist()" if plain else self.variable(arg.name)
        if isinstance(arg, Const):
            if arg.value is None or isinstance(arg.value, (bool, int)):
                return repr(arg.value)
            return self.bind(arg.value)
        return "[" + ", ".join(self.expression(item) for item in arg) + "]"

    def add(self, line: CodeLine) -> None:
        targets = [self.variable(name) for name in line.targets]
        if line.state is not None:
            self._state(line, targets)
            return
        args = [self.expression(arg, i in line.plain) for i, arg in enumerate(line.args)]
        call = f"{self.bind(line.call)}({', '.join((['states'] if line.needs_states else []) + args)})"
        post = line.post or (None,) * len(targets)
        if not line.tupled:
            wrapped = call if post[0] is None else f"{self.bind(post[0])}({call})"
            self.body.append(f"{targets[0]} = {wrapped}")
            return
        self.body.append(f"{', '.join(targets)}, = {call}" if targets else call)
        for target, fix in zip(targets, post, strict=True):
            if fix is not None:
                self.body.append(f"{target} = {self.bind(fix)}({target})")

    def _state(self, line: CodeLine, targets: list[str]) -> None:
        key = self.bind(line.state)
        if line.args:
            source = self.expression(line.args[0])
            self.body.append(f"states[{key}] = {source if line.call is None else f'{self.bind(line.call)}({source})'}")
        self.body.extend(f"{target} = states[{key}]" for target in targets)


def compile_lines(
    inputs: Sequence[str], lines: Sequence[CodeLine], outputs: Sequence[Arg]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function `(states, *inputs) -> outputs` that runs the lines.

    Lines whose results nobody uses are left out.
    """
    source = _Source(inputs)
    parameters = ", ".join(["states", *(source.variable(name) for name in inputs)])
    live = _prune(lines, outputs)
    last = last_mentions([used(line.args) | set(line.targets) for line in live])
    kept = used(outputs)
    for index, line in enumerate(live):
        source.add(line)
        dead = [source.variable(n) for n in last.get(index, ()) if n not in kept]
        if dead:
            source.body.append(f"del {', '.join(sorted(dead))}")
    results = "".join(source.expression(arg) + ", " for arg in outputs)
    text = f"def plan({parameters}):\n" + "".join(f"    {s}\n" for s in source.body) + f"    return ({results})\n"
    exec(compile(text, "<plan>", "exec"), source.globals)  # the source is ours: see the module's docstring
    plan: Callable[..., tuple[Tensor, ...]] = source.globals.pop("plan")  # a cycle would keep its constants in memory
    return plan


def _prune(lines: Sequence[CodeLine], outputs: Sequence[Arg]) -> list[CodeLine]:
    """Return the lines whose results are used, in order. Writes to states and control flow always stay."""
    wanted = used(outputs)
    kept: list[CodeLine] = []
    for line in reversed(lines):
        writes = line.state is not None and bool(line.args)
        if writes or line.needs_states or wanted & set(line.targets):
            kept.append(line)
            wanted |= used(line.args)
    return kept[::-1]
