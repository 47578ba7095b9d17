"""The engine that runs Core ML programs on this machine: Apple's Core ML, or the portable engine."""

from __future__ import annotations

import atexit
import gc
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from shardmill import interrupt
from shardmill.errors import ShardmillError

# The packages of this repository that shardmill runs: each can decide a result, and raises errors for a person to read.
CODE = ("drafted_decoding", "kit_runner", "portable_coreml", "shardmill")
NATIVE_MISSING = "coremltools lacks its native module; reinstall it: pip install --force-reinstall coremltools==9.0"
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# These set the number of threads of libraries: OpenMP, MKL, and Accelerate, which numpy and torch use on a Mac.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
SYSTEM_PROGRAMS = "/usr/bin:/usr/sbin"  # where macOS keeps its programs, even if PATH lacks these folders


def engine() -> dict[str, str]:
    """Return the engine's identity as receipts carry it: its name, and on a Mac the system's build and the chip.

    Raises:
        ShardmillError: this is a Mac whose coremltools can't reach Core ML.
    """
    if is_portable():
        return {"name": "portable"}
    return {
        "name": "coreml",
        "macos": macos(),
        "build": ask("sw_vers", "-buildVersion"),
        "chip": ask("sysctl", "-n", "machdep.cpu.brand_string"),
    }


def engine_name(precision: str = "") -> str:
    """Return the name of the engine that runs the programs on this machine: coreml or portable.

    With a precision that emulates the Neural Engine, the name says that the result is predicted.
    """
    name = engine()["name"]
    return f"{name}, {precision}: predicted" if is_portable() and precision.startswith("ane") else name


def macos() -> str:
    """Return the version of macOS, for example "26.1"; "" on another system.

    The version comes from a command of macOS. In a Python that was built with an older SDK, `platform.mac_ver` returns
    16.0 for macOS 26 (python/cpython#135675), so two Pythons on one Mac would be two engines.
    """
    return ask("sw_vers", "-productVersion") if platform.system() == "Darwin" else ""


@cache
def is_portable() -> bool:
    """Return whether programs run on the portable engine here, which they do wherever there is no Core ML.

    Raises:
        ShardmillError: this is a Mac whose coremltools can't reach Core ML.
    """
    if platform.system() != "Darwin":
        return True
    if not native_present():
        raise ShardmillError(NATIVE_MISSING)
    return False


def native_present() -> bool:
    """Return whether coremltools has its native module; look for its file only, since importing takes seconds."""
    spec = find_spec("coremltools")
    folders = spec.submodule_search_locations if spec else None
    return any(any(Path(folder).glob("libcoremlpython.*")) for folder in folders or ())


def native_call() -> AbstractContextManager[None]:
    """Let Ctrl-C and SIGTERM end the process in a call into Core ML, while coremltools holds the interpreter lock."""
    return nullcontext() if is_portable() else interrupt.at_once()


def load_programs_as(precision: str) -> AbstractContextManager[None]:
    """Compute in "fp32" or "fp16" with programs that this thread loads inside the `with` block.

    Core ML does not offer this choice: on a Mac, programs compute in fp16.
    """
    import portable_coreml

    return portable_coreml.loading_as(precision)


def precision() -> str:
    """Return the precision of programs that are loaded now."""
    import portable_coreml

    return portable_coreml.precision()


@cache
def ask(*command: str) -> str:
    """Return the output of a macOS program. Raises OSError if it is missing, CalledProcessError if it fails."""
    path = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PROGRAMS}"
    extra = {"PATH": path, "SYSTEM_VERSION_COMPAT": "0"}  # no older version of macOS, even if a shell asks for it
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | extra).stdout.strip()


def set_threads(count: int) -> None:
    """Set the threads of the portable engine; Core ML decides for itself."""
    import torch

    torch.set_num_threads(count)


def collect_rarely() -> None:
    """Let Python look for cycles of dead objects less often, and not at its end.

    Importing PyTorch and coremltools, composing a program and planning many models make millions of objects that
    stay. Searching them after every 700 new objects takes a tenth of the time. At the end, the interpreter searches
    them several times more, which takes 0.6 s of a process that imported both, a fifth of a small conversion.
    """
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)


def threads() -> int | None:
    """Return the number of threads of the portable engine; None if Core ML decides."""
    import torch

    return torch.get_num_threads() if is_portable() else None


def cores() -> int:
    """Return how many cores this process may use: a scheduler or a container may give it fewer than the machine has.

    Slurm may not bind a job to its CPUs; then only an environment variable holds the number of CPUs. The quota of a
    container limits CPU time, and leaves all cores visible.
    """
    allotted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    asked = [int(allotted)] if allotted.isdecimal() and int(allotted) else []
    return min([_reachable_cores(), *asked, *_cpu_quotas()])


def _reachable_cores() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quotas() -> Iterator[int]:
    """Yield the CPU quotas of this process' control groups, in whole cores, rounded up."""
    for file in _group_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            numbers = file.read_text().split()
            if file.name == "cpu.cfs_quota_us":
                numbers += file.with_name("cpu.cfs_period_us").read_text().split()
            quota, period = map(int, numbers)
            if quota > 0 and period > 0:  # -1 stands for no limit
                yield -(-quota // period)


def memory_bytes() -> int:
    """Return the bytes that processes may take here: the machine's memory, or the limit of a container or slice."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _group_files("memory", "memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            limits.append(int(file.read_text()))
    return min(limits)


def _group_files(controller: str, unified: str, legacy: str) -> Iterator[Path]:
    """Yield the files with a limit of this process's control group and of its parent groups.

    Args:
        controller: the controller's name in version 1, which is also the name of its folder.
        unified: the file's name in version 2.
        legacy: the file's name in version 1.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        folder, name = (GROUPS / controller, legacy) if controllers else (GROUPS, unified)
        if not controllers or controller in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            yield from (folder / each / name for each in (group, *group.parents))


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return installed versions of packages, by name; of torch with its build, such as 2.13.0+cpu."""
    return {name: torch_build() if name == "torch" else version(name) for name in sorted(names)}


@cache
def torch_build() -> str:
    """Return torch's version with its build, read from a file of torch, since importing it takes a second.

    Its metadata may lack the build: PyPI's wheels for Linux say 2.13.0, and torch calls itself 2.13.0+cu130.
    """
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    written = re.search(r"^__version__ = ['\"]([^'\"]+)", file.read_text(), re.MULTILINE) if file else None
    return written[1] if written else version("torch")


def public_version(version: str) -> str:
    """Return a version without its build: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def machine() -> dict[str, str | int]:
    """Return the properties of this machine that speeds depend on, for use beside benchmark figures only."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    if platform.system() == "Darwin":
        return ask("sysctl", "-n", "machdep.cpu.brand_string")
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else platform.processor()
