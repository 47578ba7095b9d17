"""model.json: all that a runtime needs to load and run a built model. Every path is relative to the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.files import how_to_build, json_object, load_json
from shardmill.models.architecture import MASK, RANK, SILU_TANH, SLIDING_MASK
from shardmill.models.contract import rope_inputs
from shardmill.models.interface import INFREQUENT, LABELS, TANH, TOWER, is_apart
from shardmill.models.part_kinds import PART_KINDS
from shardmill.printable import printable
from shardmill.runtime.judged import failed_gates

FORMAT = 2
UNGATED = "ungated"  # key of a manifest that was made though gates had not passed: what each of them says
EXPECTED = "expected"  # key of the results that `check` compares; older builds lack it
COMPILER = "compiler"  # key of a program: the engine whose compiler produced the bundle
SYSTEM = ("name", "macos", "build")  # keys of an engine that identify the system that a bundle is compiled for
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
}  # the keys that the runtime of an encoder reads
LONGEST = 200  # characters of a jsonschema message, which contains the value
MARK = "buckets"  # a key that only an encoder has
PART = ("name", "kind", "start", "end", "inputs", "states", "output", "program")
# Keys that only some parts have.
FORMED = ("functions", "written", "lent", "contexts", "taps", "drafter", "adapters", "tokens")
FEATURES: dict[str, Callable[[Mapping[str, Any]], bool]] = {  # a name in `uses` -> whether a build has the feature
    "contexts": lambda content: "contexts" in content,
    "functions": lambda content: any("functions" in part for part in content["parts"]),
    "bundles": lambda content: any("bundles" in part["program"] for part in content["parts"]),
    "written": lambda content: any("written" in part for part in content["parts"]),
    "experts": lambda content: any(part["kind"] == "experts" for part in content["parts"]),
    "rings": lambda content: bool(content.get("window_slots")),
    "conv": lambda content: bool(content.get("conv_taps")),
    "recurrent": lambda content: "recurrent" in content,
    "lent": lambda content: any("lent" in part for part in content["parts"] if not part.get("drafter")),
    "recurrent-blocks": lambda content: "narrow" in content.get("recurrent", {}),
    "per-layer": lambda content: any("embedded" in part["inputs"] for part in content["parts"]),
    "drafter": lambda content: "drafter" in content,
    "int8-table": lambda content: content["embedding"].get("form") == "int8",
    "causal": lambda content: bool(content.get("causal")),
    "encoder-chain": lambda content: len(content["parts"]) > len(content.get(MARK, content["parts"])),
    "adapters": lambda content: "adapters" in content,
    "dense": lambda content: "dense" in content,
    "labels": lambda content: any(part["kind"] == LABELS for part in content["parts"]),
    "images": lambda content: "images" in content,
    "audio": lambda content: "audio" in content,
    UNGATED: lambda content: UNGATED in content,
}
OF_TOWERS = (TOWER, "images", "audio")  # keys that only builds with a tower have
DISTANCES = {True: ("band", "reach"), False: ("window",)}  # numbers or null, by "is an encoder"
COMPLETE: Keys = {**RUNTIME, "packages": dict, "texts": dict}  # the keys that `verify` reads
COMPLETE_ENCODER: Keys = {**ENCODER, "packages": dict, "texts": dict}
INSTEAD = {  # shown if a decoder is used as an encoder or vice versa
    True: "holds an encoder, which writes no text; `shardmill label` and `shardmill serve` take it",
    False: "holds a decoder; `shardmill generate`, `shardmill chat` and `shardmill serve` take it",
}


def read_manifest(build: Path, kinds: Keys = RUNTIME) -> dict[str, Any]:
    """Return the content of a finished build's model.json.

    Args:
        build: the folder.
        kinds: the required keys: RUNTIME or ENCODER; COMPLETE stands for the keys of both kinds.

    Raises:
        ShardmillError: if the file is missing, lacks a key, or belongs to the other kind of model.
    """
    file = build / "model.json"
    try:
        content: dict[str, Any] = load_json(file)
        _check_features(file, content)
        encodes = isinstance(content, dict) and MARK in content
        wrong = _fault(content, COMPLETE_ENCODER if encodes and kinds is COMPLETE else kinds)
    except OSError as error:
        if build.is_file():
            raise ShardmillError(f"{build}: is a file; name the folder of a build, such as build/demo") from error
        raise ShardmillError(_absent(build, file, str(error.strerror))) from error
    except ValueError as error:
        raise ShardmillError(f"{file} is damaged: {error}; delete it and build again") from error
    if kinds in (RUNTIME, ENCODER) and encodes is not (kinds == ENCODER) and content.get("format") == FORMAT:
        raise ShardmillError(f"{build} {INSTEAD[encodes]}")
    if wrong:
        raise ShardmillError(f"{file} is no manifest of a built model: {wrong}; delete it and build again")
    return content


def _absent(build: Path, file: Path, why: str) -> str:
    """Return why there is no manifest that can be read, and what to do."""
    failed = failed_gates(build)
    if not failed:
        return f"{file} can't be read ({why}); build the model first: {how_to_build(build)}"
    first, more = failed[0], f", and {len(failed) - 1} more" if failed[1:] else ""
    return (
        f"{build}: a gate failed, so there is no model.json: {first.line} ({first.verdict}, {first.log}){more}; "
        f"`{how_to_build(build)}` says what to try, and generate, chat, label, bench, serve and device kit take the "
        "build as it is with --ungated"
    )


def _check_features(file: Path, content: Any) -> None:
    """Raise ShardmillError if a build uses a feature that this version does not know."""
    used = content.get("uses", ()) if isinstance(content, dict) else ()
    unknown = [name for name in used if name not in FEATURES] if isinstance(used, list) else []
    if unknown:
        names = ", ".join(printable(str(name))[:LONGEST] for name in unknown[:3])
        raise ShardmillError(f"{file}: the build uses {names}, which this version can't run; install a newer shardmill")


def holds_encoder(build: Path) -> bool:
    """Return whether a build is an encoder's; False if it can't be read, which its reader will report."""
    return MARK in json_object(build / "model.json")


def takes_media(build: Path) -> bool:
    """Return whether a build takes images or sounds; False if it can't be read, which its reader will report."""
    return TOWER in json_object(build / "model.json")


def open_gates(build: Path) -> tuple[str, ...]:
    """Return what the gates say that have not passed, of a build taken with `--ungated`; empty of any other."""
    return tuple(json_object(build / "model.json").get(UNGATED, ()))


def _fault(content: Any, kinds: Keys) -> str:
    """Return why parsed JSON is not a manifest of this FORMAT; "" if it is one."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f"its format is not {FORMAT}"
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            return f"{key} is missing or has the wrong type"
    for key in DISTANCES[MARK in kinds]:
        if key not in content:
            return f"{key} is missing"
    if schema_says := _breaks_schema(content, [*kinds]):
        return schema_says
    if not _ascend(content):
        return "contexts are not ascending numbers of slots below context"
    for part in content["parts"]:
        for key in _misfits(content, part):
            return f"inputs of {part['name']} do not fit {key}"
        tokens = part.get("tokens", ())
        if len(tokens) > part["end"] or max(tokens, default=0) >= content["vocab"]:
            return f"tokens of {part['name']} do not fit its rows or vocab"
    if reason := _astray(content):
        return reason
    return "" if all(map(_names_files, entries(content))) else "an entry has no valid path or no valid hashes"


def _chained(content: Mapping[str, Any]) -> bool:
    """Return whether the parts of each bucket follow one another, from the first layer to the same last one."""
    parts, count = content["parts"], len(content[MARK])
    if not count or not parts or len(parts) % count:
        return False
    each = len(parts) // count
    chains = [parts[at : at + each] for at in range(0, len(parts), each)]
    ends = [[part["end"] for part in chain] for chain in chains]
    return all([part["start"] for part in chain] == [0, *ends[0][:-1]] for chain in chains) and ends == ends[:1] * count


def bucket_of(content: Mapping[str, Any], part: Mapping[str, Any]) -> int:
    """Return the tokens that a part of an encoder takes: each bucket has equally many parts, in the buckets' order.

    Args:
        content: model.json's content, or the part of it that an engine reads.
        part: one of its parts.
    """
    buckets, names = content[MARK], [each["name"] for each in content["parts"]]
    return int(buckets[names.index(part["name"]) * len(buckets) // len(names)])


def _breaks_schema(content: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the place and the kind of the first violation of the published JSON Schema; "" if it conforms.

    Args:
        content: model.json's content.
        keys: the required keys: a runtime needs fewer than `verify`.
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
    """Yield the keys of model.json that contradict a part's inputs: tables of rope, context, window_slots."""
    if part["kind"] == TOWER:  # its rotary rows turn patches, by a table of its own
        return
    inputs, of = part["inputs"], of_drafter(content) if part.get("drafter") else content
    for name, table in of["rope"].items():
        cos, _ = rope_inputs(name)
        if cos in inputs and inputs[cos][-1] != len(table["inv_freq"]):
            yield f"the table {name} of rope"
    if any(rope_inputs(name)[0] in inputs and name not in of["rope"] for name in ("rope", "rope_local")):
        yield "rope"
    if part["kind"] != "layers":
        return
    slots = of["context"]
    for mask, width in ((MASK, slots), (SLIDING_MASK, of["window_slots"] or slots)):
        if mask in inputs and inputs[mask][-1] != width:
            yield "context" if width == slots else "window_slots"
    if "recurrent_read_mask" in inputs and inputs["recurrent_read_mask"][1] != _windows_of(of.get("recurrent")):
        yield "recurrent"


def _windows_of(recurrent: Mapping[str, int] | None) -> int:
    """Return the columns of recurrent_read_mask; 0 without a recurrence."""
    return 2 * (recurrent["block"] + recurrent["taps"] - 1) if recurrent else 0


def of_drafter(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return model.json or plan.json of the drafter alone; a drafter has no recurrence, and no drafter."""
    changed = {"rope": content["drafter"]["rope"], "conv_taps": 0}
    changed |= {} if "lent" in content["drafter"] else {"window": None, "window_slots": 0}
    rest = {key: value for key, value in content.items() if key not in ("recurrent", "drafter")}
    parts = [part for part in content["parts"] if part.get("drafter")]
    return {**rest, **changed, "parts": [{key: part[key] for key in part if key != "drafter"} for part in parts]}


def own_chain(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan.json's or model.json's content with the programs of the model's passes only."""
    parts = [part for part in content["parts"] if not is_apart(part["name"])]
    return {**{key: value for key, value in content.items() if key not in ("drafter", *OF_TOWERS)}, "parts": parts}


def of_the_stack(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan.json's or model.json's content without the programs for labels and of a tower."""
    rest = {key: value for key, value in content.items() if key not in OF_TOWERS}
    return {**rest, "parts": [part for part in content["parts"] if part["kind"] not in (LABELS, TOWER)]}


def label_tokens(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of the labels that have a program with their rows of the LM head, in the rows' order."""
    return tuple(token for part in content["parts"] if part["kind"] == LABELS for token in part["tokens"])


def entries(manifest: Mapping[str, Any]) -> Iterator[Any]:
    """Yield every entry that names files: {"path": ...} with a file's "sha256", or a folder's "files" by name."""
    yield from (manifest[key] for key in ("embedding", "tokenizer", "texts", EXPECTED) if key in manifest)
    yield from (part["program"] for part in manifest["parts"])
    yield from manifest.get("packages", {}).values()
    yield from manifest.get("dense", ())


def folds_blocks(manifest: Mapping[str, Any]) -> bool:
    """Return whether a pass wider than `verify` folds tokens of the pass itself into a recurrence's state.

    Such a pass must have only tokens that are kept: the program fills it up, and not a session.
    """
    return FEATURES["recurrent-blocks"](manifest)


def verify_width(manifest: Mapping[str, Any]) -> int:
    """Return the most tokens of a decode pass; in a build without `verify`, the widest width."""
    return int(manifest.get("verify", max(manifest["widths"])))


def lengths(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the context lengths in slots that a decoder has functions for, ascending; usually only the whole one."""
    return (*manifest.get("contexts", ()), manifest["context"])


def reshape_frequency(manifest: Mapping[str, Any]) -> str:
    """Return how often Core ML is told that shapes change; "" if every program has fixed shapes.

    A build without `reshape_frequency` has the default.
    """
    functions = [part.get("functions", {"": ""}).values() for part in manifest["parts"]]
    fixed = MARK in manifest or all(map(all, functions))
    return "" if fixed else str(manifest.get("reshape_frequency", INFREQUENT))


def in_context(manifest: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """Return the manifest as if the build had only one of its contexts.

    Args:
        manifest: a decoder's manifest.
        slots: slots of that context.
    """
    parts = [part_in(part, slots) for part in manifest["parts"]]
    others = {key: value for key, value in manifest.items() if key != "contexts"}
    return others | {"context": slots, "parts": parts}


def part_in(part: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """Return a part with the functions and shapes for `slots` slots in place of the whole context's."""
    whole = {key: value for key, value in part.items() if key != "contexts"}
    shorter = part.get("contexts", {}).get(str(slots))
    if shorter is None:
        return whole
    shapes = {key: {**part[key], **shorter.get(key, {})} for key in ("inputs", "states")}
    return whole | {"functions": shorter["functions"]} | shapes


def _ascend(content: Mapping[str, Any]) -> bool:
    """Return whether contexts, if there are any, ascend and match the contexts of the parts' functions."""
    contexts = content.get("contexts", [])
    if not isinstance(contexts, list) or not all(isinstance(slots, int) for slots in contexts):
        return False
    named = [{*part["contexts"]} for part in content["parts"] if isinstance(part, dict) and "contexts" in part]
    ascending = [0, *contexts, content["context"]] if contexts else []
    return sorted(set(ascending)) == ascending and all(keys == {*map(str, contexts)} for keys in named)


def _astray(content: Mapping[str, Any]) -> str:
    """Return why the parts can't follow one another, or ''.

    All parts must have a known kind, one at most labels. Groups of experts must follow layers and have the input
    `weights`. An encoder must have a chain of layers for each bucket.
    """
    parts, before = content["parts"], ""
    why = f"its parts are not of the kinds {', '.join(PART_KINDS)}, experts after layers, labels once"
    for part in parts:
        if part["kind"] not in PART_KINDS:
            return why
        if part["kind"] == "experts" and (before not in ("layers", "experts") or "weights" not in part["inputs"]):
            return why
        before = part["kind"]
    if [part["kind"] for part in parts].count(LABELS) > 1:
        return why
    return "its parts are not a chain of layers for each bucket" if MARK in content and not _chained(content) else ""


def _names_files(entry: Any) -> bool:
    """Return whether an entry is well formed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        return False
    path = PurePosixPath(entry["path"])
    if path.is_absolute() or ".." in path.parts:  # in a foreign build such a path could lead to any file
        return False
    return isinstance(entry.get("sha256", ""), str) and isinstance(entry.get("files", {}), dict)


def runtime_manifest(
    plan: Mapping[str, Any],
    programs: Mapping[str, Mapping[str, Any]],
    embedding: Any,
    reshape: str = INFREQUENT,
    dense: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the part of model.json that an engine reads.

    Args:
        plan: plan.json's content.
        programs: for each part, {"path": ...} and the keys that describe the bytes.
        embedding: the same keys for the host's table.
        reshape: the config's `program.reshape_frequency`.
        dense: of an encoder, the files of the projections that follow the pooling, each with its activation.
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
        **({"silu": TANH} if architecture["graph"].get("activation") == SILU_TANH else {}),
        "parts": parts,
    }
    if plan["buckets"]:
        encoder = shared | {key: plan[key] for key in ("task", "buckets", "labels", "band", "reach", "pooling")}
        encoder |= {key: plan[key] for key in ("causal", "prompts", "default_prompt") if plan.get(key)}
        encoder |= {"dense": [dict(one) for one in dense]} if dense else {}
        encoder |= {"width": width} if (width := architecture.get("ends", {}).get("project")) else {}
        if plan["task"] == RANK:
            encoder |= {key: architecture[key] for key in ("template", "instruction")}
        return encoder | {"uses": _used(encoder)}
    shorter = {"contexts": plan["contexts"]} if plan.get("contexts") else {}
    told = reshape_frequency(shared | {"reshape_frequency": reshape})
    decoder = shared | {
        "context": plan["context"],
        **shorter,
        "tokens_max": plan["tokens_max"],
        "widths": plan["widths"],
        "verify": plan["verify"],
        **({"adapters": plan["adapters"]} if plan.get("adapters") else {}),
        **({"reshape_frequency": told} if told else {}),
        "window": architecture["window"],
        "window_slots": plan["window_slots"],
        "conv_taps": architecture["graph"]["conv_taps"],
        **({"recurrent": plan["recurrent"]} if "recurrent" in plan else {}),
        "eos_token_ids": plan["eos_token_ids"],
        **({"drafter": plan["drafter"]} if "drafter" in plan else {}),
        **{key: plan[key] for key in OF_TOWERS if key in plan},
    }
    return decoder | {"uses": _used(decoder)}


def _used(content: Mapping[str, Any]) -> list[str]:
    """Return the features that a runtime must know to run a build."""
    return [name for name, has in FEATURES.items() if has(content)]


def in_place(
    plan: Mapping[str, Any], programs: Mapping[str, Path], table: Path, reshape: str = INFREQUENT
) -> dict[str, Any]:
    """Return a manifest for programs that are not yet part of a finished build; its paths are absolute."""
    paths = {name: {"path": str(path.resolve())} for name, path in programs.items()}
    return runtime_manifest(plan, paths, {"path": str(table.resolve())}, reshape)
