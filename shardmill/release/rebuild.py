"""Rebuilds the build that an attestation describes, compares every byte, and reports the result.

Nothing is installed or checked out. If shardmill's code or packages that decide bytes differ, the rebuild is refused.
The error names the packages to install or the commit to check out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import safe_open

from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.peft import CONFIG as PEFT_CONFIG
from shardmill.checkpoint.peft import WEIGHTS
from shardmill.errors import ShardmillError
from shardmill.files import replacing
from shardmill.machine import public_version
from shardmill.pipeline.cache import remote
from shardmill.pipeline.code_digest import RECORD, fetched_model_type, modules, needs_family, tools
from shardmill.pipeline.needs import STEPS
from shardmill.pipeline.resolve import lay_out, workflow_root
from shardmill.records.attest import (
    ADAPTER,
    BASE,
    BUILD_TYPE,
    CALIBRATION_TEXT,
    PARITY_TEXT,
    RECIPE,
    installed,
    read_provenance,
    versions,
)
from shardmill.records.finished import ATTESTATION, steps_of
from shardmill.records.names import SOURCE
from shardmill.release.bundle import check_build
from shardmill.release.compare import explain_difference, subject_differences
from shardmill.release.sign import ATTESTATIONS, PublicKey, read_private, write_envelopes

CODES = "codes"  # the folder of codes, and the name of a matrix' codes; other names are scales or tables


def code_lines(before: Path, after: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield lines for a person: the codes and scales that differ in total, then in each matrix that differs.

    `names` are the steps of a build; only steps that write codes count.
    """
    files = sorted(f"{name}.safetensors" for name in names if name.startswith(f"{CODES}/"))
    if not files:
        return
    if absent := [file for file in files if not ((before / file).is_file() and (after / file).is_file())]:
        yield f"codes: {absent[0]} is not in both builds, so no codes were compared"
        return
    by_matrix = {
        f"{file.removesuffix('.safetensors')}: {matrix}": counts
        for file in files
        for matrix, counts in _by_matrix(before / file, after / file).items()
    }
    other = {name: counts for name, counts in by_matrix.items() if counts["other codes"] or counts["other scales"]}
    where = f", in {len(other)} of {len(by_matrix)} matrices" if other else ""
    yield f"codes: {_counted(sum(by_matrix.values(), Counter()))}{where}"
    yield from (f"{name}: {_counted(counts)}" for name, counts in other.items())


def _by_matrix(before: Path, after: Path) -> dict[str, Counter[str]]:
    """Return by matrix and form the counts of all codes and scales, and of the different codes and scales.

    If only one file has a tensor, all its numbers count as different. Entries of tables count as scales.
    """
    counts: dict[str, Counter[str]] = {}
    with safe_open(before, framework="numpy") as one, safe_open(after, framework="numpy") as two:
        names = [{*file.keys()} for file in (one, two)]
        for name in sorted(names[0] | names[1]):
            tensors = [file.get_tensor(name) for file, known in zip((one, two), names, strict=True) if name in known]
            alike = len(tensors) == 2 and tensors[0].shape == tensors[1].shape
            size = max(values.size for values in tensors)
            other = int(np.count_nonzero(tensors[0] != tensors[1])) if alike else size
            matrix, _, last = name.rpartition(".")
            what = "codes" if last == CODES else "scales"
            counts.setdefault(matrix, Counter()).update({what: size, f"other {what}": other})
    return counts


def _counted(counts: Counter[str]) -> str:
    codes = f"{counts['other codes']:,} of {counts['codes']:,} codes"
    return f"{codes} and {counts['other scales']:,} of {counts['scales']:,} scales differ"


CONFIG = "rebuild.yaml"
NAMED = {
    PARITY_TEXT: "text that the gates were fed with",
    CALIBRATION_TEXT: "text that codes were fitted to",
    RECIPE: "file that says which form each matrix has",
}


@dataclass(frozen=True)
class RebuildTarget:
    """The original build that is to be rebuilt."""

    statement: Mapping[str, Any]  # its provenance
    folder: Path | None  # None if only the statement is given

    @property
    def definition(self) -> Mapping[str, Any]:
        """Return the build definition in the provenance."""
        definition: Mapping[str, Any] = self.statement["predicate"]["buildDefinition"]
        return definition

    @property
    def config(self) -> dict[str, Any]:
        """Return a copy of the original's config."""
        return deepcopy(dict(self.definition["externalParameters"]["config"]))


def read_original(path: Path) -> RebuildTarget:
    """Return the original at a path: a build's folder, or its provenance.json alone.

    Raises:
        ShardmillError: the original is damaged, or this shardmill does not know its build type.
    """
    if path.is_dir():
        check_build(path)
    elif path.name == "model.json":
        raise ShardmillError(f"{path}: does not record how it was built; give the folder, {path.parent}")
    folder = path if path.is_dir() else None
    original = RebuildTarget(read_provenance(folder / ATTESTATION if folder else path), folder)
    if original.definition.get("buildType") != BUILD_TYPE:
        raise ShardmillError(f"{path}: of another build type than {BUILD_TYPE}; use the shardmill that it names")
    return original


def check_tools(original: RebuildTarget) -> None:
    """Raise ShardmillError unless code, and packages that decide bytes, are here as in the original build."""
    receipts = steps_of(original.statement).values()
    wanted = versions(original.definition["resolvedDependencies"])
    deciding = sorted(wanted.keys() & _deciding({receipt["step"] for receipt in receipts}))
    other = {name: wanted[name] for name in deciding if _pin(name, installed(name)) != _pin(name, wanted[name])}
    if other:
        here = ", ".join(f"{name} {installed(name) or 'missing'}" for name in other)
        # Anybody may have written the statement, so it must not choose new packages to install.
        pins = shlex.join(f"{name}=={_pin(name, want)}" for name, want in other.items() if installed(name))
        remedy = f"pip install {pins}" if pins else "look at its provenance.json"
        raise ShardmillError(f"built with other packages; here: {here}; {remedy}")
    family = fetched_model_type(original.folder / RECORD) if original.folder else ""
    changed = sorted({receipt["step"] for receipt in receipts if not _is_our_code(receipt, family)})
    if changed:
        rows = {row["name"]: row for row in original.definition["resolvedDependencies"]}
        commit = rows["workflow"].get("digest", {}).get("gitCommit", "")
        remedy = f"check out shardmill's {commit}" if commit else "its provenance does not name the commit"
        raise ShardmillError(f"built by other code in {', '.join(changed)}; {remedy}")


def _deciding(steps: set[str]) -> set[str]:
    """Return the packages whose versions decide the bytes of these steps, and of model.json."""
    return {name for step in {*steps, "manifest"} & STEPS.keys() for name in STEPS[step].packages}


def _pin(name: str, version: str) -> str:
    """Return a package's version as it must be here: any build of torch will do."""
    return public_version(version) if name == "torch" else version


def _is_our_code(receipt: Mapping[str, Any], family: str) -> bool:
    """Return whether this shardmill has the code that ran a step.

    Code that depends on an unknown model family passes here; the final comparison shows any difference.
    """
    row = STEPS.get(receipt["step"])
    if row is None or (not family and needs_family(modules(row))):
        return row is not None
    return bool(tools(row, family)["code"] == receipt["code"])


def build_again(original: RebuildTarget, out: Path, cores: int, source: Path | None) -> Path:
    """Rebuild the original in a separate folder, and return the rebuild's folder.

    Args:
        original: the build to repeat.
        out: the folder to make.
        cores: how many cores Snakemake may use.
        source: the checkpoint's folder, if the checkpoint is not on a hub.

    Raises:
        ShardmillError: the folder is the original's, the checkpoint is not available, or the build failed.
    """
    _check_apart(original, out)
    config = original.config
    adapter = {"adapter": str(_adapter(original).resolve())} if "adapter" in config["source"] else {}
    if "repo" not in config["source"]:
        config["source"] = {"path": str(_checkpoint(original, source).resolve())}
    config["source"] |= adapter
    for key, file in _named_files(original).items():
        *sections, last = key.split(".")
        reduce(lambda content, section: content[section], sections, config)[last] = str(file.resolve())
    if config.get("benchmark") and _here(config["benchmark"]["text"]) is None:
        del config["benchmark"]  # no subject depends on the benchmark
    if not (out / CONFIG).exists():  # otherwise an interrupted build continues
        lay_out(out)
    (out / CONFIG).write_text(yaml.safe_dump(config), encoding="utf-8")
    model = str(config["model"])
    command = [sys.executable, "-m", "snakemake", f"build/{model}/{ATTESTATION}"]
    command += ["--cores", str(cores), "--configfile", CONFIG]
    # With a shared store, finished results would be fetched from the store and not built again.
    alone = {name: value for name, value in os.environ.items() if name not in (remote.URL, remote.MODE)}
    done = subprocess.run(command, cwd=out, check=False, env=alone)
    if done.returncode:
        raise ShardmillError(f"{out}: the build failed; its logs lie in {out / 'build' / model / 'logs'}")
    return out / "build" / model


def _check_apart(original: RebuildTarget, out: Path) -> None:
    """Raise ShardmillError if a folder holds the original or lies in it, as it would be compared with itself."""
    if original.folder is None:
        return
    here, target = original.folder.resolve(), out.resolve()
    if here.is_relative_to(target) or target.is_relative_to(here):
        raise ShardmillError(f"{out}: holds the build that is to be rebuilt; choose another folder with --out")


def _checkpoint(original: RebuildTarget, source: Path | None) -> Path:
    """Return the folder of a checkpoint that is not on a hub, after a check of its hashes against the provenance."""
    named = original.config["source"]["path"]
    folder = source or _here(named)
    if folder is None:
        raise ShardmillError(f"built from the folder {named}, which is not here; name its place with --source")
    prefix, hashes = f"{SOURCE}/", _dependency_hashes(original)
    for row, sha256 in hashes.items():
        name = row.removeprefix(prefix)
        if row.startswith(prefix) and not _is(folder / name, hashes.get(f"{BASE}/{name}", sha256)):
            raise ShardmillError(f"{folder / name}: not the file of the original build; give another --source")
    return folder


def _adapter(original: RebuildTarget) -> Path:
    """Return the folder of the adapter that was merged, after a check of its hashes against the provenance."""
    named, hashes = original.config["source"]["adapter"], _dependency_hashes(original)
    folder = _here(named)
    same = folder and all(_is(folder / name, hashes.get(f"{ADAPTER}/{name}", "")) for name in (PEFT_CONFIG, WEIGHTS))
    if folder is None or not same:
        raise ShardmillError(f"{named}: the adapter that was merged into the weights is not here; run where it is")
    return folder


def _dependency_hashes(original: RebuildTarget) -> dict[str, str]:
    """Return the sha256 of each file among the dependencies of a build, by name."""
    rows = original.definition["resolvedDependencies"]
    return {row["name"]: row["digest"]["sha256"] for row in rows if "sha256" in row.get("digest", {})}


def _named_files(original: RebuildTarget) -> dict[str, Path]:
    """Return the files that the config names, by config key, after a check of their hashes."""
    rows = {row["name"]: row for row in original.definition["resolvedDependencies"]}
    files: dict[str, Path] = {}
    for key in (key for key in NAMED if key in rows):
        named: Any = reduce(lambda content, name: content[name], key.split("."), original.config)
        file = _here(named)
        if file is None or not _is(file, rows[key]["digest"]["sha256"]):
            raise ShardmillError(f"{named}: the {NAMED[key]} is not here; run where it is")
        files[key] = file
    return files


def _here(named: str) -> Path | None:
    """Return a config's path in the working folder or beside the workflow; None if it does not exist."""
    return next((path for path in (Path(named), workflow_root() / named) if path.exists()), None)


def _is(path: Path, sha256: str) -> bool:
    return path.is_file() and hash_file(path) == sha256


def compare_rebuilt(original: RebuildTarget, again: Path) -> list[str]:
    """Return lines about the differences between the original and the rebuild.

    The list is empty if every subject has the same bytes.
    """
    ours = read_provenance(again / ATTESTATION)
    names = subject_differences(ours, original.statement)
    if not names:
        return []
    return [
        *explain_difference(steps_of(original.statement), steps_of(ours)),
        *(f"{name}: other bytes" for name in names),
    ]


def codes_compared(original: RebuildTarget, again: Path) -> list[str]:
    """Return lines about the codes that differ; empty for a build without a calibration text.

    The list is also empty if only the original's statement is given, since a statement holds hashes alone.
    """
    steps = steps_of(original.statement)
    return list(code_lines(original.folder, again, steps)) if original.folder else []


def state(again: Path, key: Path, beside: Path | None) -> list[Path]:
    """Sign the statement of a rebuild with the same bytes, and return the files that were written.

    The original's folder `beside` gets the envelope too; None if only the statement is given.
    """
    signer = read_private(key)
    name = f"{ATTESTATIONS}/rebuild-{PublicKey(key, signer.public_key).short}.dsse.jsonl"
    write_envelopes(again / name, [(again / ATTESTATION).read_bytes()], signer)
    if beside is None:
        return [again / name]
    (beside / name).parent.mkdir(exist_ok=True)
    with replacing(beside / name) as fresh:  # a pulled build's files are links to the hub's cache
        shutil.copyfile(again / name, fresh)
    return [again / name, beside / name]
