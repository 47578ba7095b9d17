"""manifest: model.json, written only when every gate has passed, and the files that it names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.checkpoint.layout import text_files
from shardmill.errors import ShardmillError
from shardmill.files import load_json, read_json, write_json
from shardmill.models.interface import BUNDLE, INFREQUENT
from shardmill.pipeline.task import Artifact, Task
from shardmill.records.finished import check_files, named_files
from shardmill.records.names import RECEIPT, SOURCE
from shardmill.runtime.manifest import COMPILER, EXPECTED, SYSTEM, entries, runtime_manifest
from shardmill.templates.chat_format import chat_format
from shardmill.templates.render import has_template

log = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
# Core ML's specification version -> the oldest systems that load it; shardmill writes the first.
SYSTEMS = {9: {"macos": "15.0", "ios": "18.0"}, 10: {"macos": "26.0", "ios": "26.0"}}
# Keys of generation_config.json for sampling -> the least and the largest value that a runtime accepts.
SAMPLING = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (0, 1 << 24),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


def task(
    summary: Path,
    record: Path,
    stack: Artifact,
    packages: list[Artifact],
    bundles: list[Artifact],
    table: Artifact,
    expected: Artifact,
    form: str = "fp16",
    reshape: str = INFREQUENT,
) -> Task:
    """Describe model.json. Its hashes come from the receipts, and every file is compared with them.

    The stack's verdict gives how close two logits are whose order may change with the width of a pass. The form of the
    embedding table is named unless it is fp16.
    """
    root = summary.parent

    def work(made: Mapping[str, Path]) -> None:
        content = described(summary, record, packages, bundles, table, form, reshape)
        content |= {key: value for key, value in read_json(stack.path).items() if key == "margin"}
        content[EXPECTED] = _described(expected, root)
        check_files(content, root)
        for entry in entries(content):
            entry["bytes"] = sum((root / name).stat().st_size for name, _ in named_files(entry))
        write_json(made["manifest"], content)

    return Task(work)


def described(
    summary: Path,
    record: Path,
    packages: list[Artifact],
    bundles: list[Artifact],
    table: Artifact,
    form: str,
    reshape: str,
) -> dict[str, Any]:
    """Return model.json's content but for sizes of files and what gates measured; `task` explains the arguments."""
    root, plan, source = summary.parent, read_json(summary), read_json(record)
    tables = _described(table, root) | ({"form": form} if form != "fp16" else {})
    compilers = {bundle.path.stem: _compiler(bundle.path) for bundle in bundles}
    programs = {
        name: program | _bundles(program) | {COMPILER: compilers[name]}
        for name, program in _by_part(bundles, root).items()
    }
    hashes = {name: file["sha256"] for name, file in source["files"].items()}
    dense = [
        {"path": f"{SOURCE}/{one['file']}", "sha256": hashes[one["file"]], "activation": one["activation"]}
        for one in plan.get("dense", ())
    ]
    content = runtime_manifest(plan, programs, tables, reshape, dense)
    # Compiled bundles last as long as their operating system; on a newer one the packages are compiled again.
    content["packages"] = _by_part(packages, root)
    content["tokenizer"] = {"path": f"{SOURCE}/{TOKENIZER}", "sha256": hashes[TOKENIZER]}
    # What chat and serve read beside it: the template, the special tokens, how to generate.
    others = sorted(set(text_files(hashes)) - {TOKENIZER})
    content["texts"] = {"path": SOURCE, "files": {name: hashes[name] for name in others}}
    content["source"] = {key: source[key] for key in ("repo", "commit")}
    content |= _requires(packages)
    if not plan["buckets"]:
        content |= _sampling(root / SOURCE) | _chat(root / SOURCE, content["eos_token_ids"], content["vocab"])
    return content


def _by_part(artifacts: list[Artifact], root: Path) -> dict[str, dict[str, Any]]:
    return {artifact.path.stem: _described(artifact, root) for artifact in artifacts}


def _compiler(bundle: Path) -> dict[str, str]:
    """Return who compiled a bundle, and for which system."""
    engine = read_json(bundle.with_suffix(RECEIPT))["engine"]
    return {key: engine[key] for key in SYSTEM if key in engine}


def _bundles(program: Mapping[str, Any]) -> dict[str, Any]:
    """Return where each function's bundle lies; empty if the program is one bundle."""
    names = sorted({file.partition("/")[0] for file in program["files"]})
    bundles = {name.removesuffix(BUNDLE): f"{program['path']}/{name}" for name in names if name.endswith(BUNDLE)}
    return {"bundles": bundles} if bundles else {}


def _described(artifact: Artifact, root: Path) -> dict[str, Any]:
    """Return the path relative to `root`, and the sha256 of the file, or of each file in the folder, as it was made."""
    where = {"path": artifact.path.relative_to(root).as_posix()}
    return where | ({"files": dict(artifact.files)} if artifact.files else {"sha256": artifact.sha256})


def _requires(packages: Sequence[Artifact]) -> dict[str, Any]:
    """Return the oldest systems that load every package; empty if a package has an unknown specification version."""
    versions = {_specification(artifact) for artifact in packages}
    return {"requires": SYSTEMS[max(versions)]} if versions and versions <= SYSTEMS.keys() else {}


def _specification(package: Artifact) -> int:
    """Return the specification version of a package; 0 if it has none.

    It is the first field of the model's message: a tag, then a number that takes one byte up to 127.
    """
    model = next((name for name in package.files if name.endswith(".mlmodel")), None)
    if model is None:
        return 0
    with (package.path / model).open("rb") as file:
        tag, number = file.read(2)
    return number if tag == 8 and number < 128 else 0


def _sampling(source: Path) -> dict[str, Any]:
    """Return how the checkpoint's authors sample; empty if they do not say that they do."""
    file = source / GENERATION
    said = load_json(file) if file.is_file() else {}
    if not isinstance(said, dict) or said.get("do_sample") is not True:
        return {}
    options = {
        name: said[name]
        for name, (least, most) in SAMPLING.items()
        if type(said.get(name)) in ((int,) if name == "top_k" else (int, float)) and least <= said[name] <= most
    }
    return {"sampling": {"temperature": 1.0, **options}}


def _chat(source: Path, eos: Sequence[int], vocab: int) -> dict[str, Any]:
    """Return how a conversation becomes text; empty if no form is proven equal to the checkpoint's template."""
    try:
        templated, why = has_template(source), "the checkpoint has no chat template"
    except ShardmillError as error:  # a damaged tokenizer_config.json; whoever chats is told
        templated, why = False, str(error)
    formats, why = chat_format(source) if templated else ({}, why)
    if not formats:
        log.info("no `chat` in model.json: %s", why)
    return {
        name: form | {"stop": [token for token in form["stop"] if token < vocab and token not in eos]}
        for name, form in formats.items()
    }
