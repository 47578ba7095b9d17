"""model.json: what a runtime needs to load and run a built model. Every path is relative to the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.models.architecture import MASK, SLIDING_MASK
from shardmill.models.calls import INFREQUENT
from shardmill.models.contract import rope_inputs
from shardmill.printable import printable

FORMAT = 2
COMPILER = "compiler"  # key of a program: the engine whose compiler made its bundle
SYSTEM = ("name", "macos", "build")  # of an engine, what a bundle is compiled for
Keys = Mapping[str, type]
SHARED: Keys = {"model": str, "vocab": int, "rope": dict, "embedding": dict, "parts": list, "tokenizer": dict}
RUNTIME: Keys = {  # what the runtime of a decoder reads
    **SHARED,
    "context": int,
    "tokens_max": int,
    "widths": list,
    "window_slots": int,
    "conv_taps": int,
    "eos_token_ids": list,
}
ENCODER: Keys = {
    **SHARED,
    "task": str,
    "buckets": list,
    "labels": list,
    "pooling": str,
}  # what that of an encoder reads
LONGEST = 200  # characters of a schema's message, which contains the value
MARK = "buckets"  # only an encoder has them
PART = ("name", "kind", "start", "end", "inputs", "states", "output", "program")
FORMED = ("functions", "written", "contexts")  # what a part has besides where its program has another form than most
KINDS = ("layers", "experts", "head", "encoder")
DISTANCES = {True: ("band", "reach"), False: ("window",)}  # of an encoder and of a decoder: numbers, or null
COMPLETE: Keys = {**RUNTIME, "packages": dict, "texts": dict}  # what verify looks at too
COMPLETE_ENCODER: Keys = {**ENCODER, "packages": dict, "texts": dict}
INSTEAD = {  # for who takes the one for the other
    True: "holds an encoder, which writes no text; `shardmill label` and `shardmill serve` take it",
    False: "holds a decoder; `shardmill generate`, `shardmill chat` and `shardmill serve` take it",
}


def read_manifest(build: Path, kinds: Keys = RUNTIME) -> dict[str, Any]:
    """model.json of a finished build.

    Args:
        build: the folder.
        kinds: the keys that it must have: RUNTIME or ENCODER; COMPLETE stands for what either has.

    Raises:
        ShardmillError: where there is none, one without these keys, or one of the other kind of model.
    """
    file = build / "model.json"
    try:
        content: dict[str, Any] = load_json(file)
        encodes = isinstance(content, dict) and MARK in content
        wrong = next(faults(content, COMPLETE_ENCODER if encodes and kinds is COMPLETE else kinds), None)
    except OSError as error:
        why = error.strerror
        raise ShardmillError(f"{file} can't be read ({why}); build the model first: snakemake --cores 4 all") from error
    except ValueError as error:
        raise ShardmillError(f"{file} is damaged: {error}; delete it and build again") from error
    if kinds in (RUNTIME, ENCODER) and encodes is not (kinds == ENCODER) and content.get("format") == FORMAT:
        raise ShardmillError(f"{build} {INSTEAD[encodes]}")
    if wrong:
        raise ShardmillError(f"{file} is no manifest of a built model: {wrong}; delete it and build again")
    return content


def holds_encoder(build: Path) -> bool:
    """Whether a build is an encoder's; of one that can't be read, whoever reads it says why."""
    try:
        content = load_json(build / "model.json")
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and MARK in content


def faults(content: Any, kinds: Keys) -> Iterator[str]:
    """What keeps parsed JSON from being a manifest of this FORMAT."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        yield f"it does not say format {FORMAT}"
        return
    wrong = [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]
    if wrong:
        yield f"{wrong[0]} is not there or not of its type"
        return
    missing = [key for key in DISTANCES[MARK in kinds] if key not in content]
    if missing:
        yield f"{missing[0]} is not there"
        return
    schema_says = _breaks_schema(content, [*kinds])
    if schema_says:
        yield schema_says
        return
    if not _ascend(content):
        yield "contexts are not numbers of slots that ascend to that of context"
    yield from (
        f"inputs of {part['name']} do not fit {key}" for part in content["parts"] for key in _misfits(content, part)
    )
    if not _follow(content["parts"]):
        yield f"its parts are not of the kinds {', '.join(KINDS)}, experts after layers"
    if not all(_names_files(entry) for entry in entries(content)):
        yield "an entry does not say where its file lies"


def _breaks_schema(content: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return where model.json breaks its published JSON Schema, and how; "" if it does not.

    Args:
        content: of model.json.
        keys: which ones must be there: a runtime needs fewer than whoever verifies a build.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    schema = load_json(Path(__file__).with_name("encoder.schema.json" if MARK in content else "model.schema.json"))
    error = best_match(Draft202012Validator({**schema, "required": [*keys]}).iter_errors(content))
    if error is None:
        return ""
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
    said = error.message if len(error.message) < LONGEST else f"does not fit {error.validator} of the schema"
    return printable(f"{place.removeprefix('.') or 'it'}: {said}")


def _misfits(content: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of model.json that a part's inputs contradict: tables of rope, context, window_slots."""
    inputs = part["inputs"]
    for name, table in content["rope"].items():
        cos, _ = rope_inputs(name)
        if cos in inputs and inputs[cos][-1] != len(table["inv_freq"]):
            yield f"the table {name} of rope"
    if any(rope_inputs(name)[0] in inputs and name not in content["rope"] for name in ("rope", "rope_local")):
        yield "rope"
    if part["kind"] != "layers":
        return
    slots = content["context"]
    for mask, kept in ((MASK, slots), (SLIDING_MASK, content["window_slots"] or slots)):
        if mask in inputs and inputs[mask][-1] != kept:
            yield "context" if kept == slots else "window_slots"


def entries(manifest: Mapping[str, Any]) -> Iterator[Any]:
    """Every entry that names files: {"path": ...} with the file's "sha256", or those of a folder's "files" by name."""
    yield from (manifest[key] for key in ("embedding", "tokenizer", "texts") if key in manifest)
    yield from (part["program"] for part in manifest["parts"])
    yield from manifest.get("packages", {}).values()


def verify_width(manifest: Mapping[str, Any]) -> int:
    """The most tokens of a decode pass; of a build made before model.json said it, those of the widest."""
    return int(manifest.get("verify", max(manifest["widths"])))


def lengths(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of slots that a decoder's programs have functions for, ascending; mostly the whole context alone."""
    return (*manifest.get("contexts", ()), manifest["context"])


def reshape_frequency(manifest: Mapping[str, Any]) -> str:
    """Return how often Core ML is told that shapes change; "" where no program takes several.

    Of a build made before model.json said it, it is the default.
    """
    functions = [part.get("functions", {"": ""}).values() for part in manifest["parts"]]
    fixed = MARK in manifest or all(map(all, functions))
    return "" if fixed else str(manifest.get("reshape_frequency", INFREQUENT))


def in_context(manifest: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """The manifest of the same build as if it had one context only, which is one of those that it has.

    Args:
        manifest: of a decoder.
        slots: of that context.
    """
    parts = [_part_in(part, str(slots)) for part in manifest["parts"]]
    others = {key: value for key, value in manifest.items() if key != "contexts"}
    return others | {"context": slots, "parts": parts}


def _part_in(part: Mapping[str, Any], slots: str) -> dict[str, Any]:
    """A part with what it has for a number of slots in the place of what it has for the whole context."""
    own = {key: value for key, value in part.items() if key != "contexts"}
    shorter = part.get("contexts", {}).get(slots)
    if shorter is None:
        return own
    shapes = {key: {**part[key], **shorter.get(key, {})} for key in ("inputs", "states")}
    return own | {"functions": shorter["functions"]} | shapes


def _ascend(content: Mapping[str, Any]) -> bool:
    """Whether contexts, where there are some, ascend, and are those that parts have functions for."""
    given = content.get("contexts", [])
    if not isinstance(given, list) or not all(isinstance(slots, int) for slots in given):
        return False
    named = [list(part["contexts"]) for part in content["parts"] if isinstance(part, dict) and "contexts" in part]
    ascending = [0, *given, content["context"]] if given else []
    return sorted(set(ascending)) == ascending and all(keys == [str(slots) for slots in given] for keys in named)


def _follow(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether parts are of the kinds that there are, and groups of experts say whose input they get and how many."""
    before = ""
    for part in parts:
        if part["kind"] not in KINDS:
            return False
        if part["kind"] == "experts" and (before not in KINDS[:2] or "weights" not in part["inputs"]):
            return False
        before = part["kind"]
    return True


def _names_files(entry: Any) -> bool:
    """Whether an entry has its form."""
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        return False
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts:  # of a stranger's build, it could be any file
        return False
    return isinstance(entry.get("sha256", ""), str) and isinstance(entry.get("files", {}), dict)


def runtime_manifest(
    plan: Mapping[str, Any], programs: Mapping[str, Mapping[str, Any]], embedding: Any, reshape: str = INFREQUENT
) -> dict[str, Any]:
    """The part of model.json that an engine reads.

    Args:
        plan: plan.json's content.
        programs: by part name, each {"path": ...} and whatever describes the bytes.
        embedding: the same for the host's table.
        reshape: the config's `program.reshape_frequency`.
    """
    architecture = plan["architecture"]
    parts = [
        {key: row[key] for key in (*PART, *FORMED) if key in row} | {"program": dict(programs[row["name"]])}
        for row in plan["parts"]
        if row["kind"] != "embedding"
    ]
    shared = {
        "format": FORMAT,
        "model": plan["model"],
        "vocab": architecture["vocab"],
        "rope": architecture["ropes"],
        "embedding": embedding,
        "parts": parts,
    }
    if plan["buckets"]:
        return shared | {key: plan[key] for key in ("task", "buckets", "labels", "band", "reach", "pooling")}
    shorter = {"contexts": plan["contexts"]} if plan.get("contexts") else {}
    told = reshape_frequency(shared | {"reshape_frequency": reshape})
    return shared | {
        "context": plan["context"],
        **shorter,
        "tokens_max": plan["tokens_max"],
        "widths": plan["widths"],
        "verify": plan["verify"],
        **({"reshape_frequency": told} if told else {}),
        "window": architecture["window"],
        "window_slots": plan["window_slots"],
        "conv_taps": architecture["graph"]["conv_taps"],
        "eos_token_ids": plan["eos_token_ids"],
    }


def in_place(
    plan: Mapping[str, Any], programs: Mapping[str, Path], table: Path, reshape: str = INFREQUENT
) -> dict[str, Any]:
    """A manifest for programs that are not yet part of a finished build; its paths start from /."""
    paths = {name: {"path": str(path.resolve())} for name, path in programs.items()}
    return runtime_manifest(plan, paths, {"path": str(table.resolve())}, reshape)
