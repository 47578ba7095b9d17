"""A kit: builds, their expected outputs, and the measuring program, in one zip that is all that a Mac needs.

The same builds give the same bytes: files are sorted, stored and undated. kit.json names every other file's sha256.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from kit_runner import kit as runner
from kit_runner.kit import ASKED, HOW, KIT, KIT_FORMAT
from portable_coreml.judge.limits import SYSTEMS, limits

from shardmill.checkpoint.hashing import hash_file
from shardmill.device.recording import Arrays, record
from shardmill.errors import ShardmillError
from shardmill.files import dumps, json_object, replacing
from shardmill.gates.nonfinite import layer_of
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.imports import quiet_coremltools
from shardmill.models.contract import CACHE_ITEM_BYTES
from shardmill.models.interface import EACH, ONE, own_bundle
from shardmill.printable import printable
from shardmill.records.finished import check_files
from shardmill.runtime.manifest import (
    COMPILER,
    COMPLETE,
    MARK,
    UNGATED,
    bucket_of,
    in_context,
    lengths,
    read_manifest,
    reshape_frequency,
    verify_width,
)


def kit_description(build: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a build's form.

    Args:
        build: the folder.
        manifest: the content of its model.json.
    """
    encodes = MARK in manifest
    packages = [build / entry["path"] for entry in manifest["packages"].values()]
    return {
        "kind": "encoder" if encodes else "decoder",
        "context": None if encodes else manifest["context"],
        "verify": None if encodes else verify_width(manifest),
        "widths": _widths_of(manifest),
        "shapes": "fixed" if encodes else _shapes(manifest["parts"][0]),
        "state": None if encodes else "host" if any("written" in part for part in manifest["parts"]) else "graph",
        "reshape_frequency": reshape_frequency(manifest) or None,
        **({"silu": manifest["silu"]} if "silu" in manifest else {}),
        "bundles": EACH if any("bundles" in part["program"] for part in manifest["parts"]) else ONE,
        "programs": len(manifest["parts"]),
        "weights_bytes": sum(map(weights_bytes, packages)),
        "state_bytes": sum(CACHE_ITEM_BYTES * prod(shape) for part in manifest["parts"] for shape in _kept(part)),
        "parameters": sum(map(_parameters, packages)),
        "precision": _precision(build),
        **({UNGATED: manifest[UNGATED]} if UNGATED in manifest else {}),
    }


def _shapes(part: Mapping[str, Any]) -> str:
    """Return the kind of shapes that a decoder's programs accept."""
    names = part.get("functions", {}).values()
    return "range" if not names else "fixed" if all(names) else "enumerated"


def _kept(part: Mapping[str, Any]) -> list[list[int]]:
    """Return the shapes of the states, or of the host's caches."""
    return [*part["states"].values(), *(part["inputs"][name] for name in part.get("written", {}))]


def _widths_of(manifest: Mapping[str, Any]) -> list[int]:
    """Return the numbers of tokens that passes have."""
    return list(manifest[MARK] if MARK in manifest else manifest["widths"])


def weights_bytes(package: Path) -> int:
    """Return the bytes of a package's weight files."""
    return sum(file.stat().st_size for file in package.rglob("weights/*"))


def _parameters(package: Path) -> int:
    """Return the number of elements in a package's matrices, for any storage form."""
    from portable_coreml.files.bundle import load_model
    from portable_coreml.program import TensorType

    elements: dict[str, int] = {}
    stored: set[str] = set()  # names of constants that an operation expands to a matrix
    for function in load_model(package).program.functions.values():
        for op in function.block.walk():
            if op.kind.split(".")[-1].startswith("const"):
                stored |= {name for names in op.inputs.values() for name in names if isinstance(name, str)}
                kinds = {out.name: out.type for out in op.outputs if isinstance(out.type, TensorType)}
                shapes = {name: [extent or 1 for extent in kind.shape] for name, kind in kinds.items()}
                elements |= {name: prod(shape) for name, shape in shapes.items() if sum(n > 1 for n in shape) > 1}
    return sum(count for name, count in elements.items() if name not in stored)


def _precision(build: Path) -> str:
    """Return the default form in precision.json; "mixed" if it names matrices, "" if it can't be read."""
    recipe = json_object(build / "precision.json")
    return "mixed" if recipe.get("matrices") else str(recipe.get("default", ""))


ROOT = "shardmill-kit"  # the folder that a kit unpacks to
STEPS = f"cd {ROOT} && {HOW}"  # commands for a person who has unpacked the kit
README = """\
This kit measures Core ML programs on this machine. That is a Mac with Apple silicon and macOS 15 or newer.
It needs Python 3.10 to 3.13, with coremltools 9.0 and numpy. Apple's own python3 is older. Where python3.12 is missing,
get it from python.org, or from Homebrew: brew install python@3.12

    python3.12 -m venv .venv && .venv/bin/pip install coremltools==9.0 numpy
    .venv/bin/python measure.py

It may be stopped at any time and goes on where it was. At last it writes result.json, which is what to send back.
`sudo .venv/bin/python measure.py` measures energy too.
"""
Content = bytes | Path


def write_kit(builds: Sequence[Path], target: Path, questions: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Pack builds into a kit.

    Args:
        builds: folders of finished builds.
        target: the zip, which replaces an old file when it is complete.
        questions: about the system, as `questions.questions` returns them.

    Returns:
        kit.json's content.

    Raises:
        ShardmillError: a folder is not a finished build, a file was changed, or two builds have the same name.
    """
    if target.is_dir():
        raise ShardmillError(f"{target}: is a folder; name the file to write")
    names = [build.resolve().name for build in builds]
    for name in names:
        if names.count(name) > 1:
            raise ShardmillError(f"two of the builds are called {name}: rename the folder of one")
    arrays = Arrays()
    variants: list[dict[str, Any]] = []
    files: dict[str, Content] = dict(_runner())
    for name, build in zip(names, builds, strict=True):
        manifest = read_manifest(build, COMPLETE)
        check_files(manifest, build)
        files |= _packages(name, build, manifest) | _portable_bundles(name, build, manifest)
        variants += _variants(name, build, manifest, arrays)
    called = [variant["name"] for variant in variants]
    if ASKED in called:
        raise ShardmillError(f"a kit calls its questions {ASKED}: rename the folder of the build")
    for name in called:
        if called.count(name) > 1:  # a build's folder may have the name of another build's shorter context
            raise ShardmillError(f"two of the variants are called {printable(name)}: rename the folder of a build")
    files |= {f"arrays/{key}.npy": content for key, content in arrays.files.items()}
    content = {
        "format": KIT_FORMAT,
        "limits": {
            "psnr": THRESHOLDS["psnr"].limit,
            "weight_bytes": {system: limits(system).weight_bytes.most for system in SYSTEMS},
        },
        "questions": list(questions),
        "variants": variants,
        "files": {name: _sha256(files[name]) for name in sorted(files)},
    }
    with replacing(target) as temporary:
        _zip(temporary, files | {KIT: dumps(content).encode()})
    return content


def _runner() -> Iterator[tuple[str, Content]]:
    """Yield measure.py and the package that it imports, as both lie in the repository."""
    for file in sorted(Path(runner.__file__).parent.glob("[!.]*.py")):
        yield "measure.py" if file.name == "measure.py" else f"kit_runner/{file.name}", file.read_bytes()
    yield "README.txt", README.encode()


def _packages(name: str, build: Path, manifest: Mapping[str, Any]) -> dict[str, Content]:
    """Return all files of a build's packages, and its manifest, by their names in the kit."""
    contents: dict[str, Content] = {f"variants/{name}/model.json": build / "model.json"}
    for entry in manifest["packages"].values():
        for file in entry["files"]:
            contents[f"variants/{name}/{entry['path']}/{file}"] = build / entry["path"] / file
    return contents


def _portable_bundles(name: str, build: Path, manifest: Mapping[str, Any]) -> dict[str, Content]:
    """Return the files of bundles that the portable compiler wrote, by their names in the kit.

    Files that a program's package contains too, such as the weights, are left out: measure.py takes them from there.
    """
    contents: dict[str, Content] = {}
    for part in manifest["parts"]:
        if not _is_portable(part):
            continue
        packed = set(manifest["packages"][part["name"]]["files"].values())
        path = part["program"]["path"]
        files = {file: sha for file, sha in part["program"]["files"].items() if sha not in packed}
        contents |= {f"variants/{name}/{path}/{file}": build / path / file for file in files}
    return contents


def _is_portable(part: Mapping[str, Any]) -> bool:
    """Return whether the portable compiler made a part's bundle, according to model.json."""
    return bool(part["program"].get(COMPILER, {}).get("name") == "portable")


def _variants(name: str, build: Path, manifest: Mapping[str, Any], arrays: Arrays) -> Iterator[dict[str, Any]]:
    """Yield a build as a variant, then each shorter context as a separate variant NAME@SLOTS."""
    if MARK in manifest:
        yield _variant(name, build, manifest, arrays)
        return
    whole, *shorter = reversed(lengths(manifest))
    first = _variant(name, build, in_context(manifest, whole), arrays)
    yield first
    known = [_function(program) for part in first["parts"] for program in part["programs"]]
    for slots in shorter:
        variant = _variant(name, build, in_context(manifest, slots), arrays)
        for program in (program for part in variant["parts"] for program in part["programs"]):
            if _function(program) in known:
                program["of"] = name
        yield variant | {"name": f"{name}@{slots}"}


def _function(program: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the identity of a program: its package and its function there."""
    return program["path"], program["function"]


def _variant(name: str, build: Path, manifest: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return kit.json's entry for a build of one context."""
    with quiet_coremltools():
        recording = record(build, manifest, arrays)
    return {
        "name": name,
        "model": manifest["model"],
        "source": manifest.get("source", {}),
        "described": kit_description(build, manifest),
        "artifacts": {part: entry["files"] for part, entry in manifest["packages"].items()},
        "parts": [_part(name, build, manifest, place) for place in range(len(manifest["parts"]))],
        "recorded": {str(width): rows for width, rows in recording.passes.items()},
        "tokens": {str(width): tokens for width, tokens in recording.tokens.items()},
        **({"checks": recording.checks} if recording.checks else {}),
    }


def _part(name: str, build: Path, manifest: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a part and its programs: one for all widths, one for an encoder's width, or a function for each width."""
    part, widths = manifest["parts"][place], _widths_of(manifest)
    package = manifest["packages"][part["name"]]["path"]
    program = {
        "path": f"variants/{name}/{package}",
        "function": None,
        "widths": [bucket_of(manifest, part)] if MARK in manifest else widths,
        "fixed": MARK in manifest,
        "weights": weights_bytes(build / package),
        "bundle": _bundle(name, manifest, place, ""),
    }
    programs = [
        program
        | {"function": function, "widths": [int(width)], "fixed": True, "alone": "bundles" in part["program"]}
        | {"bundle": _bundle(name, manifest, place, function)}
        for width, function in part.get("functions", {}).items()
        if function
    ]
    if not (program["fixed"] or programs):
        program["reshape_frequency"] = reshape_frequency(manifest)
    return {
        "name": part["name"],
        "kind": part["kind"],
        "output": part["output"],
        "stateful": bool(part["states"]),
        "layers": _layers(build / package),
        "programs": programs or [program],
    }


def _bundle(name: str, manifest: Mapping[str, Any], place: int, function: str) -> dict[str, str] | None:
    """Return the places of a bundle's files in the kit, by their names in the bundle; None if Apple compiled it."""
    part = manifest["parts"][place]
    if not _is_portable(part):
        return None
    program, package = part["program"], manifest["packages"][part["name"]]
    of_package = {sha: f"{package['path']}/{file}" for file, sha in package["files"].items()}
    prefix = f"{own_bundle(Path(), function).as_posix()}/" if "bundles" in program else ""
    files = {file: sha for file, sha in program["files"].items() if file.startswith(prefix)}
    places = {file: of_package.get(sha, f"{program['path']}/{file}") for file, sha in files.items()}
    return {file.removeprefix(prefix): f"variants/{name}/{path}" for file, path in places.items()}


def _layers(package: Path) -> list[list[Any]]:
    """Return the layers of a package in order, each with the output of its first operation."""
    from portable_coreml.files.bundle import load_model

    layers: list[list[Any]] = []
    for function in load_model(package).program.functions.values():
        for output, layer in layer_of(function).items():
            if not layers or layers[-1][1] != layer:
                layers.append([output, layer])
    return layers


def _sha256(content: Content) -> str:
    return hash_file(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def _zip(target: Path, files: Mapping[str, Content]) -> None:
    """Write an undated zip of stored files: weights do not shrink, and no library's version decides the bytes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"{ROOT}/{name}")
            entry.external_attr, entry.create_system = 0o644 << 16, 3
            content = files[name]
            with archive.open(entry, "w", force_zip64=True) as inside:
                if isinstance(content, bytes):
                    inside.write(content)
                    continue
                with open(content, "rb") as source:
                    while block := source.read(1 << 22):
                        inside.write(block)
