"""The compiled bundles that this machine may load: the build's bundles, or its packages compiled again into a cache.

Core ML specialises a bundle for one version of the system. A bundle from another version may fail to load with error
-14, and a bundle of the portable compiler was never compared with Apple's for states, iOS 18 operations or blockwise
weights. So Core ML loads the bundles that its own compiler made on this version of the system. For all others, the
package is compiled here, once for each version of the system, and a line on standard error reports it.

A first load on a Mac takes minutes, so a listener can learn which program is being loaded.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from kit_runner.packages import with_one_function

from shardmill import machine
from shardmill.errors import ShardmillError
from shardmill.files import SCRATCH, cache_folder, digest, read_json
from shardmill.models.interface import BUNDLE, own_bundle
from shardmill.printable import first_line
from shardmill.runtime.manifest import COMPILER, SYSTEM

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_reshape: ContextVar[str] = ContextVar("reshape", default="")


@contextmanager
def on_program_load(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener`, and the listeners around it, with the name of every program whose load begins in this thread."""
    outer = _listener.get()

    def tell(name: str) -> None:
        listener(name)
        if outer is not None:
            outer(name)

    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def report_load(name: str) -> None:
    """Report that the load of a program begins."""
    listener = _listener.get()
    if listener is not None:
        listener(name)


def program_bytes(build: Path, part: Mapping[str, Any]) -> int:
    """Return the bytes of a part's program in a build."""
    return sum(file.stat().st_size for file in (build / part["program"]["path"]).rglob("*") if file.is_file())


@contextmanager
def reshaping(frequency: str) -> Iterator[None]:
    """Tell Core ML how often shapes change for programs loaded in this context and thread; nothing if ""."""
    token = _reshape.set(frequency)
    try:
        yield
    finally:
        _reshape.reset(token)


def hints() -> dict[str, Any]:
    """Return extra arguments for loading a coremltools model; empty unless `reshaping` is active."""
    import coremltools as ct

    if not _reshape.get():
        return {}
    return {"optimization_hints": {"reshapeFrequency": ct.ReshapeFrequency[_reshape.get().capitalize()]}}


def compile_package(package: Path, bundle: Path, functions: Iterable[str] = ()) -> None:
    """Compile a package to one bundle, or each of its functions to a separate bundle.

    Args:
        package: the .mlpackage.
        bundle: the .mlmodelc to write; a folder of bundles if there are functions.
        functions: the names of the functions that get separate bundles.

    Raises:
        RuntimeError: Core ML rejects the package.
    """
    names = sorted(set(functions))
    if not names:
        _compile(package, bundle)
        return
    bundle.mkdir()
    for name in names:
        with tempfile.TemporaryDirectory(dir=bundle.parent) as scratch:
            alone = Path(scratch) / f"{name}.mlpackage"
            with_one_function(package, alone, name)
            _compile(alone, own_bundle(bundle, name))


def _compile(package: Path, bundle: Path) -> None:
    import coremltools as ct

    with machine.native_call():
        ct.models.utils.compile_model(str(package), str(bundle))


def loadable(manifest: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Return the manifest with paths to bundles that this machine may load; compile the missing ones.

    Args:
        manifest: model.json's content.
        root: the build's folder.

    Raises:
        ShardmillError: a program has neither a bundle nor a package, or its package can't be compiled.
    """
    parts = [
        part | {"program": part["program"] | {"path": str(_bundle(manifest, part, root))}} for part in manifest["parts"]
    ]
    return {**manifest, "parts": parts}


def _bundle(manifest: Mapping[str, Any], part: Mapping[str, Any], root: Path) -> Path:
    """Return the absolute path of the bundle to load for a part."""
    bundle: Path = (root / part["program"]["path"]).resolve()
    entry = manifest.get("packages", {}).get(part["name"])
    package: Path | None = root / entry["path"] if entry else None
    if bundle.exists():
        foreign = _foreign(bundle, part)
        if not foreign:
            return bundle
        if package is None or not package.is_dir():
            _say(f"{bundle.name} was compiled by {foreign}, and its package is not in the build: loaded as it is")
            return bundle
        why = f"its bundle was compiled by {foreign}"
    elif package is None or not package.is_dir():
        raise ShardmillError(f"{bundle} is missing, and so is its package; pull the build again, or build it")
    else:
        why = "the build has no bundle for it"
    return _compiled_here(part, package, why)


def _foreign(bundle: Path, part: Mapping[str, Any]) -> str:
    """Return who compiled a bundle that this machine's Core ML should not load; "" if it may load it."""
    if machine.is_portable():
        return ""
    made = part["program"].get(COMPILER) or _recorded(bundle)
    here = machine.engine()
    if made and all(made.get(key) == here.get(key) for key in SYSTEM):
        return ""
    if not made:
        return "an unknown compiler"
    return "the portable compiler" if made["name"] == "portable" else f"macOS {made.get('macos')} ({made.get('build')})"


def _recorded(bundle: Path) -> Mapping[str, Any]:
    """Return the engine that a bundle's receipt names; empty if there is no receipt."""
    try:
        engine = read_json(bundle.with_suffix(".receipt.json")).get("engine")
    except (OSError, ShardmillError):
        return {}
    return engine if isinstance(engine, Mapping) else {}


def _compiled_here(part: Mapping[str, Any], package: Path, why: str) -> Path:
    """Return a package's bundle from the cache; if it is missing, compile it and delete other systems' bundles."""
    functions = _functions(part) if part["program"].get("bundles") else []
    home = cache_folder() / "compiled" / digest({"package": str(package.resolve()), "functions": functions})[:32]
    system = {key: value for key, value in machine.engine().items() if key in SYSTEM}
    folder = home / digest({"system": system, "files": _stamps(package)})[:32]
    bundle = folder / f"{part['name']}{BUNDLE}"
    if bundle.is_dir():
        return bundle
    report_load(part["name"])
    _say(f"compiling {package.name} for this machine: {why}")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShardmillError(
            f"{home}: can't be made ({error.strerror}), and programs compiled for this machine belong there; set "
            "XDG_CACHE_HOME to a folder that is writable"
        ) from error
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=home) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        try:
            compile_package(package, made / bundle.name, functions)
        except RuntimeError as error:
            raise ShardmillError(f"{package} can't be compiled: {first_line(error)}") from error
        for other in home.iterdir():
            if other != folder and not other.name.startswith(SCRATCH):  # other processes may be working in them
                shutil.rmtree(other, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not bundle.is_dir():
                raise
    return bundle


def _stamps(package: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of each file of a package.

    The hashes in model.json of a foreign build may be false.
    """
    files = {file.relative_to(package).as_posix(): file.stat() for file in package.rglob("*") if file.is_file()}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in files.items()}


def _functions(part: Mapping[str, Any]) -> list[str]:
    """Return the names of a part's functions for all lengths of its context."""
    each = [part.get("functions", {}), *(one["functions"] for one in part.get("contexts", {}).values())]
    return sorted({name for names in each for name in names.values() if name})


def _say(line: str) -> None:
    print(f"shardmill: {line}", file=sys.stderr, flush=True)
