"""Compiled bundles, which carry the build of the system that they were compiled on.

A bundle lasts as long as the system that it was compiled for, and whether Core ML loads one of the portable compiler is
not known. So each load of another's bundle is logged; MAC_FOREIGN=refuse fails it as error -14.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

from simulated_mac import log, waiting
from simulated_mac.native_calls import demand, ns_error

MARK = "simulated-mac.json"


def build() -> str:
    """Return the build of this system, as sw_vers has it."""
    return os.environ.get("MAC_BUILD") or "24G84"


def compile_model(*arguments: Any) -> str:
    """Compile to the temporary folder, as compileModel (CoreMLPython.mm:1085), and return the path.

    Raises:
        RuntimeError: the file can't be compiled.
    """
    demand(len(arguments) == 1 and isinstance(arguments[0], str), "compileModel")
    from portable_coreml.errors import PortableError
    from portable_coreml.files import bundle

    source = Path(arguments[0])
    target = Path(tempfile.gettempdir()) / f"{source.stem}_{uuid.uuid4().hex[:8].upper()}.mlmodelc"
    seconds = waiting.take("compile", str(source))
    try:
        bundle.compile_model(source, target)
    except (PortableError, OSError) as error:
        raise ns_error(f"Failed to compile {source}: {error}") from None
    (target / MARK).write_text(json.dumps({"build": build()}), encoding="utf-8")
    log.write("compile", path=str(source), to=str(target), seconds=seconds)
    return str(target)


def check(path: str) -> None:
    """Raise RuntimeError if Core ML would load nothing from a path."""
    folder = Path(path)
    if not (folder / "coremldata.bin").is_file():
        raise ns_error(f"A valid manifest does not exist at path: {path}")
    failing = os.environ.get("MAC_FAIL_LOAD")
    if failing and failing in path:
        raise failed(path)
    mark = folder / MARK
    made = json.loads(mark.read_text(encoding="utf-8"))["build"] if mark.is_file() else "portable"
    if made != build():
        log.write("foreign_bundle", path=path, compiled_by=made)
        if os.environ.get("MAC_FOREIGN") == "refuse":
            raise failed(path)


def failed(path: str) -> RuntimeError:
    """Error -14, as Core ML words it."""
    return ns_error(
        "Failed to build the model execution plan using a model architecture file "
        f"'{path}/model.mil' with error code: -14."
    )
