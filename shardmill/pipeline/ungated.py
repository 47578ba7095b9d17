"""A build whose gates have not all passed, for whoever runs or measures it nevertheless.

Such a build has no model.json, and never gets one here. What its receipts say becomes a manifest in a temporary folder,
among links to the build's files. The manifest names each gate that has not passed, so that every output can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from shardmill import interrupt
from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import digest, how_to_build, read_json, write_json
from shardmill.models.interface import BUNDLE, INFREQUENT
from shardmill.pipeline.job import read_artifact
from shardmill.pipeline.steps.manifest import described
from shardmill.pipeline.task import Artifact
from shardmill.plan import load_part
from shardmill.records.names import RECEIPT, SOURCE
from shardmill.runtime.judged import GATES, PASSED, STACK, judged
from shardmill.runtime.manifest import UNGATED

PREFIX = "shardmill-ungated-"  # begins the names of the temporary folders


@contextmanager
def taken_ungated(build: Path) -> Iterator[Path]:
    """Yield the folder to read a build from: the build's own or, without a model.json, a temporary one of its name.

    Raises:
        ShardmillError: not all programs of the build are made.
    """
    if (build / "model.json").exists():
        yield build
        return
    content = _manifest(build)
    scratch = Path(mkdtemp(prefix=PREFIX))
    with interrupt.scratch(scratch):
        view = scratch / build.resolve().name
        view.mkdir()
        for file in build.resolve().iterdir():
            (view / file.name).symlink_to(file)
        write_json(view / "model.json", content)
        yield view


def _manifest(build: Path) -> dict[str, Any]:
    """Return what model.json would say but for its sizes, and which gates have not passed."""
    parts = [row["name"] for row in _made(build, "plan.json")["parts"] if row["kind"] != "embedding"]
    packages, bundles = ([*each] for each in zip(*(_program(build, name) for name in parts), strict=True))
    table = _made(build, f"embedding{RECEIPT}")
    content = described(
        build / "plan.json",
        build / f"{SOURCE}{RECEIPT}",
        packages,
        bundles,
        read_artifact(build / "embedding.safetensors"),
        table["params"]["form"],
        _reshape(build),
    )
    gates = judged(build)
    stack = next(one for one in gates if one.part == STACK)
    said = stack.content or (read_json(stack.verdict) if stack.state == PASSED else {})
    content |= {key: value for key, value in said.items() if key == "margin"}
    content["uses"].append(UNGATED)
    return content | {UNGATED: [one.line for one in gates if one.state != PASSED] or ["model.json: not made"]}


def _made(build: Path, name: str) -> Any:
    """Return the content of a record of the build. Raises ShardmillError if it is not made yet."""
    try:
        return read_json(build / name)
    except UnreadableError as error:
        raise ShardmillError(
            f"{build / name}: not made yet, and --ungated needs all programs of a build: {how_to_build(build)}"
        ) from error


def _program(build: Path, name: str) -> tuple[Artifact, Artifact]:
    """Return a part's package and its bundle, which is what the plan's part, and then the package, became."""
    of_package, of_bundle = (_made(build, f"{folder}/{name}{RECEIPT}") for folder in ("packages", "compiled"))
    package = read_artifact(build / "packages" / f"{name}.mlpackage")
    if of_package["inputs"]["part"] != digest(load_part(build / "parts" / f"{name}.json").content):
        raise ShardmillError(f"{package.path}: made by another config; build it anew: {how_to_build(build)}")
    bundle = read_artifact(build / "compiled" / f"{name}{BUNDLE}")
    if of_bundle["inputs"]["package"] != package.sha256:
        raise ShardmillError(f"{bundle.path}: made of another package; build it anew: {how_to_build(build)}")
    return package, bundle


def _reshape(build: Path) -> str:
    """Return the config's `program.reshape_frequency`, which verdicts on parity have; otherwise its default."""
    for gate in GATES:
        for file in sorted((build / gate).glob("*.json")):
            verdict = read_json(file)
            if "reshape_frequency" in verdict:
                return str(verdict["reshape_frequency"])
    return INFREQUENT
