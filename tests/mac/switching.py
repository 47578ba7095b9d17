"""What each switch of the simulated Mac does to a program: one JSON object, for test_switches.py.

Run as `tests/mac/run python tests/mac/switching.py BUNDLE`. Switches are read when they matter, so that one process
can try them all; MAC_OWNERS=1 is set from outside.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coremltools as ct
import small

KEPT, FRESH = 50, 3


@contextmanager
def switched(**switches: str) -> Iterator[None]:
    """Set environment variables, and unsets them."""
    os.environ.update(switches)
    yield
    for name in switches:
        del os.environ[name]


def loaded(bundle: str) -> Any:
    """Return the small program."""
    return ct.models.CompiledMLModel(bundle, ct.ComputeUnit.CPU_AND_NE)


def refusal(bundle: str, **switches: str) -> str:
    """Return the error of a load; "" if it succeeds."""
    with switched(**switches):
        try:
            loaded(bundle)
        except RuntimeError as error:
            return str(error)
        return ""


def passed(bundle: str, way: str) -> list[float]:
    """Return an output of one token, and an output of a pass of four."""
    with switched(MAC_WIDTHS=way):
        model = loaded(bundle)
    return [float(model.predict(small.passed(n), model.make_state())["hidden"].ravel()[0]) for n in (1, 4)]


def owned(bundle: str) -> None:
    """Run passes whose input is kept, and some whose input is not."""
    model, kept = loaded(bundle), small.passed(2)["x"]
    state = model.make_state()
    for _ in range(KEPT):
        model.predict({"x": kept}, state)
    for _ in range(FRESH):
        model.predict(small.passed(2), state)
    KEEP.append(kept)


def off_the_engine(bundle: str, named: str) -> list[str]:
    """Return the kinds of operations that a compute plan does not let run on the Neural Engine."""
    from kit_runner.compute_plan import planned

    with switched(MAC_OFF_ANE=named):
        return sorted({row["operation"] for row in planned(Path(bundle)) if row["status"] == "ineligible"})


KEEP: list[Any] = []  # until the process ends


def overwritten(bundle: str) -> None:
    """Run a pass whose input changes while it runs."""
    model, given = loaded(bundle), small.passed(2)
    KEEP.append(given["x"])
    inner = model._proxy._narrow.predict

    def meanwhile(inputs: Any, state: Any) -> Any:
        given["x"][:] = 7
        return inner(inputs, state)

    model._proxy._narrow.predict = meanwhile
    model.predict(given, model.make_state())


def ending(call: Callable[[], Any]) -> int:
    """Return the signal that ends a process which makes a call; 0 if none does."""
    child = os.fork()
    if not child:
        call()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def main(bundle: str) -> dict[str, Any]:
    """Try them all."""
    native = ct.libcoremlpython._MLModelProxy
    with switched(MAC_LOAD_SECONDS="0.01", MAC_FIRST_PASS_SECONDS="0.01"):
        widths = {way or "plain": passed(bundle, way) for way in ("", "narrow", "wide")}
    owned(bundle)
    overwritten(bundle)
    return {
        "widths": widths,
        "fails": refusal(bundle, MAC_FAIL_LOAD=Path(bundle).stem),
        "other": refusal(bundle, MAC_FAIL_LOAD="other"),
        "foreign": refusal(bundle, MAC_BUILD="25A354", MAC_FOREIGN="refuse"),
        "tolerated": refusal(bundle, MAC_BUILD="25A354"),
        "plan": ending(lambda: native.get_compute_plan(bundle.replace(".mlmodelc", ".mlpackage"), "ALL")),
        "units": ending(lambda: native(bundle, "CPU_AND_ANE", "", {}, None)),
        "hint": ending(lambda: native(bundle, "ALL", "", {"reshapeFrequency": "Seldom"}, None)),
        "off": {named: off_the_engine(bundle, named) for named in ("", "mul,add", "range:mul", "range:relu,m")},
        "fine": ending(lambda: native(bundle, "ALL", "", {"reshapeFrequency": "Frequent"}, None)),
    }


if __name__ == "__main__":
    if not Path(sys.argv[1]).exists():
        package = small.make(Path(sys.argv[1]).parent)
        ct.models.utils.compile_model(str(package), sys.argv[1])
    print(json.dumps(main(sys.argv[1])))
