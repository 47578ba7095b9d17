"""What a process on the simulated Mac sees and what the native module does: one JSON object, for test_stand_in.py.

Run as `tests/mac/run python tests/mac/inside.py FOLDER`; small.mlpackage is written into the folder.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import small


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the kind and the text of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def system() -> dict[str, Any]:
    """Return names, functions and units."""
    import multiprocessing

    import torch  # finds its libraries

    grown = np.ones(8 << 20)  # 64 MB
    return {
        "platform": str(sys.platform),
        "is_darwin": sys.platform == "darwin",
        "names": [platform.system(), platform.machine(), platform.mac_ver()[0], os.uname().sysname],
        "start": multiprocessing.get_start_method(),
        "absent": [hasattr(os, "sched_getaffinity"), hasattr(select, "epoll"), hasattr(resource, "prlimit")],
        "proc": [os.path.exists("/proc"), Path("/proc/self/status").exists(), outcome(lambda: open("/proc/stat"))],
        "threads": torch.get_num_threads() > 0,
        "peak_in_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > grown.nbytes,
        "version": subprocess.check_output(["/usr/bin/sw_vers", "-productVersion"], text=True),
        "chip": subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True),
        "solver": outcome(solve),
        "native": native_file(),
    }


def solve() -> Any:
    """Let PuLP's own solver solve something."""
    import pulp

    return pulp.PULP_CBC_CMD(msg=False).solve(pulp.LpProblem())


def native_file() -> str:
    """Return the file of coremltools' native module."""
    from coremltools import libcoremlpython

    return Path(libcoremlpython.__file__).name


def rules(folder: Path) -> dict[str, Any]:
    """Return what the native module takes, refuses and gives."""
    import coremltools as ct

    package = small.make(folder)
    bundle = ct.models.utils.compile_model(str(package), str(folder / "small.mlmodelc"))
    model = ct.models.CompiledMLModel(bundle, ct.ComputeUnit.CPU_AND_NE)
    proxy, state = model._proxy, model.make_state()
    x = small.passed(1)["x"]
    read_only = x.copy()
    read_only.flags.writeable = False
    tries: dict[str, Callable[[], Any]] = {
        "fp32": lambda: proxy.predict({"x": x}, state.__proxy__)["hidden"].dtype.name,
        "fp16 through coremltools": lambda: model.predict({"x": x.astype(np.float16)}, state)["hidden"].dtype.name,
        "fp16": lambda: proxy.predict({"x": x.astype(np.float16)}, state.__proxy__),
        "int64": lambda: proxy.predict({"x": x.astype(np.int64)}, state.__proxy__),
        "bool": lambda: proxy.predict({"x": x > 0}, state.__proxy__),
        "read-only": lambda: proxy.predict({"x": read_only}, state.__proxy__),
        "reversed": lambda: proxy.predict({"x": x[:, ::-1]}, state.__proxy__),
        "list": lambda: proxy.predict({"x": x.tolist()}, state.__proxy__),
        "number": lambda: proxy.predict({"x": 1}, state.__proxy__),
        "missing": lambda: proxy.predict({}, state.__proxy__),
        "more": lambda: sorted(proxy.predict({"x": x, "other": x}, state.__proxy__)),
        "too many tokens": lambda: proxy.predict(small.passed(small.MOST + 1), state.__proxy__),
        "names": lambda: proxy.predict(data={"x": x}, state=state.__proxy__),
        "one argument": lambda: proxy.predict({"x": x}),
        "no state": lambda: proxy.predict({"x": x}, None),
        "read": lambda: state.read_state("kept").dtype.name,
        "read other": lambda: state.read_state("other"),
        "write fp32": lambda: state.write_state("kept", np.zeros((1, small.WIDTH, 1, 1), np.float32)),
        "write fp16": lambda: state.write_state("kept", np.zeros((1, small.WIDTH, 1, 1), np.float16)),
        "write shape": lambda: state.write_state("kept", np.zeros((1, small.WIDTH), np.float32)),
        "class of states": lambda: type(state.__proxy__).__name__,
        "hints": lambda: hinted(bundle, ct),
        "hint of a number": lambda: type(proxy)(bundle, "CPU_ONLY", "", {"reshapeFrequency": 1}, None),
        "hints are no dictionary": lambda: type(proxy)(bundle, "CPU_ONLY", "", None, None),
        "no bundle": lambda: ct.models.CompiledMLModel(str(folder / "none.mlmodelc")),
        "no package": lambda: ct.models.utils.compile_model(str(folder / "none.mlpackage")),
        "plan": lambda: plan(bundle),
        "compiled to nowhere": lambda: ct.models.utils.compile_model(str(package)),
        "left": lambda: len(list(Path(os.environ["TMPDIR"]).glob("*.mlmodelc"))),
    }
    return {name: outcome(call) for name, call in tries.items()}


def hinted(bundle: str, ct: Any) -> str:
    """Return the output of a model that was loaded with a hint."""
    hints = {"reshapeFrequency": ct.ReshapeFrequency.Infrequent}
    model = ct.models.CompiledMLModel(bundle, ct.ComputeUnit.CPU_AND_NE, optimization_hints=hints)
    return str(model.predict(small.passed(2), model.make_state())["hidden"].dtype.name)


def plan(bundle: str) -> Any:
    """Return operations of a plan with the devices of each, and what is told once the plan has ended."""
    from coremltools.models.compute_plan import MLComputePlan

    loaded = MLComputePlan.load_from_path(bundle)
    operations = loaded.model_structure.program.functions["main"].block.operations
    usages = {op.operator_name: loaded.get_compute_device_usage_for_mlprogram_operation(op) for op in operations}
    named = {name: usage and type(usage.preferred_compute_device).__name__ for name, usage in usages.items()}
    evidence = hasattr(loaded.__proxy__, "evidence")
    other = MLComputePlan.load_from_path(bundle)
    del loaded
    return [named, evidence, [other.get_compute_device_usage_for_mlprogram_operation(op) for op in operations][-1]]


if __name__ == "__main__":
    print(json.dumps({"system": system(), "rules": rules(Path(sys.argv[1]))}), file=sys.stderr)
