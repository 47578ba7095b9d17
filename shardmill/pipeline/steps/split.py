"""split: plan.json and parts/*.json from the safetensors headers; every tensor hashed and checked, none copied."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import plan
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.headers import ITEM_BYTES
from shardmill.checkpoint.tokenizer import TOKENIZER, check_vocabulary, read_tokenizer, single_tokens
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import digest, read_json, write_json
from shardmill.models.architecture import (
    EMBED,
    EMBEDDING,
    PREFIX,
    RANK,
    ModelDescription,
    blocks,
    name_under,
)
from shardmill.models.contract import window_slots
from shardmill.models.eagle3 import FOLDER, TOKENS, DrafterDescription
from shardmill.models.encoder import with_answers
from shardmill.models.end_tokens import eos_token_ids
from shardmill.models.interface import GRAPH, HOST, LABELS, MTP, NATIVE, RANGE, TOWER
from shardmill.models.part_kinds import interface
from shardmill.models.recurrences import written
from shardmill.pipeline.task import Action, Task, Tools, source_folder
from shardmill.printable import printable

if TYPE_CHECKING:
    from shardmill.checkpoint.headers import TensorInfo
    from shardmill.config import Config

log = logging.getLogger(__name__)
DECIDING = (
    "model",
    "context",
    "buckets",
    "pooling",
    "answers",
    "topology",
    "experts",
    "tokens",
    "head",
    "convert",
)  # keys of the config
# Keys of the section `program` that a plan records, with their usual values; not how programs are compiled or loaded.
FORM: Mapping[str, Any] = {"shapes": RANGE, "state": GRAPH, "contexts": [], "silu": NATIVE}

HEAD = "lm_head.weight"
ROWS = 4096  # of a matrix that are compared at a time
BF16_STEP = 2**-7  # between neighbouring bf16 numbers, relative
FP16_STEP = 2**-24  # between fp16's smallest numbers


def task(
    record: Path,
    recipe: list[Path],
    settings: Mapping[str, Any],
    hashes: HashCache,
    tools: Tools,
    threads: int = 1,
    limits: Sequence[Mapping[str, Any]] = (),
) -> Task:
    """Describe a plan, which depends on the checkpoint's files and on the config except settings of later measurements.

    `recipe` is the file that the config's `convert.precision` names, if it names one. `limits` are
    devices' answers (evidence/limits.py).
    """
    fetched = read_json(record)
    files = fetched["files"]

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.config import config_of

        config = config_of(settings)
        parts, content = split(source_folder(record), config, hashes, files, threads)
        _warn(config, parts)
        for part in parts:
            plan.write_part(made[part.name], part)
        write_json(made["summary"], content)

    relevant = {name: settings[name] for name in DECIDING}
    form = {key: settings["program"][key] for key in FORM}
    form |= {key: asked for key in ("adapters", "labels", "runs_on") if (asked := settings["program"].get(key))}
    relevant |= {"program": form} if form != FORM else {}
    known = {"files": digest(files), "recipe": digest([hash_file(file) for file in recipe])}
    known |= {"drafter": digest(fetched["drafter"]["files"])} if "drafter" in fetched else {}
    relevant |= {"drafter": MTP} if settings.get("drafter") == MTP else {}
    relevant |= {"limits": [*limits]} if limits else {}
    relevant |= {key: asked for key in ("images", "audio") if (asked := settings.get(key))}
    return Task(work, Action("split", known, relevant, **tools))


def split(
    source: Path, settings: Config, hashes: HashCache, files: Mapping[str, Any], threads: int = 4
) -> tuple[tuple[plan.Part, ...], dict[str, Any]]:
    """Return the parts and plan.json's content. Raises ConfigError or CheckpointError. `files` is source.json's."""
    from shardmill import topology
    from shardmill.checkpoint.hashing import scan_checkpoint
    from shardmill.checkpoint.headers import check_tensors, check_tied, read_tensors
    from shardmill.models.hf_config import load_hf_config
    from shardmill.pipeline import traffic
    from shardmill.weight_files import weight_limit

    hf = load_hf_config(source)
    model = topology.as_configured(settings, _described(settings, hf, source))
    if settings.answers:
        model = with_answers(model, settings.answers, answer_tokens(source, settings.answers))
    architecture = model.architecture
    check_vocabulary(source / TOKENIZER, architecture.vocab)
    try:
        settings = topology.resolve_topology(settings, architecture)
    except ConfigError as error:
        raise ConfigError(f"{settings.model}: {error}") from error
    if any(rope.factors == "long" for rope in architecture.ropes.values()):
        log.warning("context %d is over the original length: LongRoPE's long factors throughout", settings.length)
    tensors = read_tensors(source)
    model = model.stored_as(tensors)
    drafter, of_drafter = _read_drafter(source, settings, model, hf, tensors)
    _refuse_foreign(model, tensors)
    check_tensors(tensors, plan.tensor_shapes(model), optional=ignored(model, tensors))
    _check_fixed(model, tensors, source)
    labels = _label_tokens(source, settings, architecture.vocab)
    drafts = plan.draft_parts(settings, model, tensors | of_drafter, drafter, labels)
    whole = {name: tensors[name] for name in map(_uncut, plan.every_tensor(drafts)) if name in tensors}
    wanted = whole | {tensor.label: tensor.info for tensor in plan.every_tensor(drafts)}
    head = name_under(model.prefix, HEAD)
    copied = architecture.tied and head in model.ignored and head in tensors
    scan = scan_checkpoint(source, wanted | ({head: tensors[head]} if copied else {}), hashes, threads)
    if copied and not _same_numbers(tensors[head], tensors[model.prefix + EMBEDDING], source):
        check_tied(scan.tensors, head, model.prefix + EMBEDDING)
    parts = plan.with_hashes(drafts, scan.tensors)
    chain = [part for part in parts if not part.is_apart]
    host = {
        "eos_token_ids": eos_token_ids(source, hf, architecture.vocab),
        "source": _model_digest(chain, scan.tensors, files),
    }
    derived = {
        "weight_file_limit": weight_limit(settings).most,
        "systems": list(settings.systems),
        "weights": asdict(traffic.stored_weights(chain, settings.convert.recipe)),
        "passes": [asdict(one) for one in traffic.pass_traffic(settings, architecture)],
        "lengths": [asdict(one) for one in traffic.traffic_lengths(settings, architecture)],
    }
    drafting = _host_side(drafter, source, architecture.vocab) if drafter else None
    result = _plan_json(settings, model, parts, drafting) | host | derived | media_rules(settings, model, source)
    return parts, result | read_out(settings, model, source)


def _described(settings: Config, hf: Any, source: Path) -> ModelDescription:
    """Return the description of a checkpoint's model, with its tower if the config has images or sounds."""
    from shardmill.models import family
    from shardmill.models.hf_config import model_description
    from shardmill.models.towers import with_tower

    model = model_description(family(hf.model_type, settings.kind), hf, settings.length)
    return with_tower(model, source, "images" if settings.images else "audio") if settings.tower else model


def _warn(settings: Config, parts: Iterable[plan.Part]) -> None:
    """Log which programs some of the config's systems are expected to run on the CPU."""
    from shardmill.weight_files import file_bytes, warnings

    programs = [part for part in parts if part.kind != "embedding"]
    for line in warnings(settings, {p.name: file_bytes(p.named_shapes, settings.recipe) for p in programs}):
        log.warning("%s", line)


def _plan_json(
    config: Config, model: ModelDescription, parts: Sequence[plan.Part], drafter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return plan.json: the chosen topology with its byte budget, and the model's settings that the host needs.

    `drafter` is what the host needs of a drafter.
    """
    tower = model.architecture.tower
    rows = [
        {
            "name": p.name,
            "kind": p.kind,
            "start": p.start,
            "end": p.end,
            **({} if p.kind == plan.HOST_TABLE else interface(p.spec)),
            **plan.part_sizes(p, p.parameters),
            **({"drafter": True} if p.drafter else {}),
            **({"tokens": p.row_tokens[: len(config.program.labels)]} if p.kind == LABELS else {}),
        }
        for p in parts
    ]
    return {
        "model": config.model,
        "kind": config.kind,
        "context": config.length,
        "tokens_max": config.tokens.max,
        "widths": list(config.widths),
        "contexts": list(config.program.contexts),
        "verify": config.verify,
        **({"adapters": config.calls.adapters} if config.calls.adapters else {}),
        "buckets": list(config.sizes),
        **{key: getattr(model.architecture, key) for key in ("task", "labels", "band", "reach", "causal")},
        "tables": {tensor.path: tensor.source.tensor for tensor in parts[-1].tensors},
        "architecture": asdict(model.architecture, dict_factory=written) | {"layers": model.architecture.layers},
        "prefix": model.prefix,
        "item_bytes": max(ITEM_BYTES[tensor.info.dtype] for tensor in plan.every_tensor(parts)),
        "conv_taps": model.architecture.graph.conv_taps,
        **plan.recurrent(model.architecture.graph, config.tokens.max, config.verify),
        "rope": {name: asdict(rope) for name, rope in model.architecture.ropes.items()},
        "window": model.architecture.window,
        "window_slots": window_slots(model.architecture.window, config.tokens.max, config.length),
        **({"drafter": dict(drafter)} if drafter else {}),
        **({TOWER: dict(tower.host)} if tower else {}),
        "parts": rows,
    }


def media_rules(config: Config, model: ModelDescription, source: Path) -> dict[str, Any]:
    """Return what the host does with images or sounds, as plan.json has it; nothing for a build of text alone.

    Raises:
        CheckpointError: if there are no rules for the checkpoint's processor, or they contradict its tower.
    """
    from shardmill.media.extractors import checkpoint_sound_rules
    from shardmill.media.processors import checkpoint_image_rules

    tower = model.architecture.tower
    if tower is not None and config.audio is not None:
        return {"audio": {**checkpoint_sound_rules(source, tower.host).written(), "most": config.audio.most}}
    if tower is None or config.images is None:
        return {}
    rules = checkpoint_image_rules(source, config.images.sizes[-1])
    if (rules.patch, rules.merge) != (tower.host["patch"], tower.host["merge"]):
        theirs = f"patches of {rules.patch} pixels, {rules.merge} a side of a row"
        ours = f"{tower.host['patch']} and {tower.host['merge']}"
        raise CheckpointError(f"{source}: its image processor has {theirs}; config.json says {ours}")
    return {"images": {**rules.written(), "most": config.images.most}}


def read_out(settings: Config, model: ModelDescription, source: Path) -> dict[str, Any]:
    """Return how an encoder's rows become one result for a text, as plan.json has it; nothing for a decoder.

    Args:
        settings: the config.
        model: the model.
        source: the checkpoint's folder.

    Raises:
        CheckpointError: if the host can't compute what the checkpoint's modules say.
        ConfigError: if the config contradicts the modules.
    """
    from shardmill.checkpoint.modules import Modules, check_text_settings, read_modules

    a = model.architecture
    if a.ends is None:
        return {}
    embeds = a.task == EMBED
    modules = read_modules(source, a.ends.project or a.graph.hidden) if embeds else Modules()
    if embeds:
        check_text_settings(source, settings.sizes)
    if modules.pooling and settings.pooling not in (None, modules.pooling):
        raise ConfigError(
            f"pooling: {settings.pooling}, but the checkpoint's modules say {modules.pooling}; leave it out"
        )
    pooling = settings.pooling or modules.pooling or ("last" if a.task == RANK else "mean")
    file = source / "tokenizer.json"
    if embeds and pooling == "last" and file.is_file() and not read_tokenizer(file).encode("a").special_tokens_mask[-1]:
        raise CheckpointError(f"{file}: puts no token after a text, whose row `pooling: last` takes; fetch another one")
    dense = [{"file": one.file, "activation": one.activation} for one in modules.dense]
    said = {"pooling": pooling, "dense": dense, "prompts": dict(modules.prompts), "default_prompt": modules.prompt}
    if a.task != RANK:
        return said
    rows = blocks(model.sources["classifier.weight"])[: len(a.labels)]
    return said | {"head": rows[0].tensor, "answers": [row.rows[0] for row in rows if row.rows]}


def answer_tokens(source: Path, answers: Sequence[str]) -> list[int]:
    """Return the token of each answer. Raises ConfigError if an answer is several tokens."""
    tokenizer = read_tokenizer(source / "tokenizer.json")
    tokens = [tokenizer.encode(answer, add_special_tokens=False).ids for answer in answers]
    for answer, ids in zip(answers, tokens, strict=True):
        if len(ids) != 1:
            raise ConfigError(f"answers: {answer!r} is {len(ids)} tokens; each answer must be one token")
    return [ids[0] for ids in tokens]


def _label_tokens(source: Path, settings: Config, vocab: int) -> Sequence[int]:
    """Return the token of each of the config's `program.labels`. Raises ConfigError if a label has no row."""
    labels = single_tokens(source / TOKENIZER, named) if (named := settings.program.labels) else []
    if labels and max(labels) >= vocab:
        raise ConfigError(f"program.labels: the LM head has {vocab} rows, no row for token {max(labels)}")
    return labels


def _read_drafter(
    source: Path, settings: Config, model: ModelDescription, hf: Any, tensors: Mapping[str, TensorInfo]
) -> tuple[DrafterDescription | None, dict[str, TensorInfo]]:
    """Return the description of a config's drafter and the tensors of its own checkpoint, if it has one.

    Their names and files begin with FOLDER.

    Args:
        source: where the model's checkpoint lies, with the drafter's in a folder inside it.
        settings: the config; without a drafter there is no description and no tensor.
        model: the drafter's model.
        hf: transformers' config of the model.
        tensors: of the model's checkpoint.

    Raises:
        CheckpointError: the checkpoint is no drafter that can be built, or another model's.
        ConfigError: a program of the drafter would be too large.
    """
    from shardmill import topology
    from shardmill.checkpoint.headers import check_tensors, read_tensors
    from shardmill.models import mtp
    from shardmill.models.drafters import describe_checkpoint

    if settings.drafter is None:
        return None, {}
    folder, target = source / FOLDER, model.architecture
    headers: Mapping[str, TensorInfo] = {}
    if settings.drafter == MTP:
        vocab = settings.head.draft_vocab_size
        drafter = mtp.describe(hf, tensors, target, settings.length, model.prefix, vocab)
    else:
        headers = read_tensors(folder)
        drafter = describe_checkpoint(folder, headers, target, settings.length, hosted=settings.program.state == HOST)
    for problem in topology.overweight_drafter(settings, target, drafter):
        raise ConfigError(problem)
    renamed = {FOLDER + n: replace(info, name=FOLDER + n, file=FOLDER + info.file) for n, info in headers.items()}
    shapes = plan.drafter_shapes(settings, target, drafter)
    inner = {name: info for name, info in tensors.items() if name in shapes or name.startswith(f"{MTP}.")}
    check_tensors(renamed or inner, shapes, optional=drafter.model.ignored)
    return drafter, renamed


def _host_side(drafter: DrafterDescription, source: Path, vocab: int) -> dict[str, Any]:
    """Return what the host needs of a drafter for a model of `vocab` tokens.

    Raises CheckpointError if the checkpoint does not say which tokens it drafts, or not in their order.
    """
    a = drafter.model.architecture
    ropes = {name: asdict(rope) for name, rope in a.ropes.items()}
    content = {"kind": drafter.kind, "taps": list(drafter.taps), "vocab": a.vocab, "rope": ropes}
    content |= {"lent": [layer for layer, _ in drafter.lent]} if drafter.lent else {}
    return content | ({"tokens": _token_bits(source / FOLDER, a.vocab, vocab)} if drafter.mapped else {})


def _token_bits(folder: Path, rows: int, vocab: int) -> str:
    """Return a bit for each token up to the last of the `rows` that an LM head has, in base64.

    The lowest bit of a byte comes first. Raises CheckpointError, see `_host_side`.
    """
    import numpy as np

    from shardmill.checkpoint.headers import read_tensors

    info = read_tensors(folder).get(TOKENS)
    if info is None:
        raise CheckpointError(f"drafter: its LM head has {rows} of {vocab} tokens, and no {TOKENS} says which")
    if info.shape != (rows,) or info.dtype not in ("I64", "I32"):
        raise CheckpointError(f"drafter: {TOKENS} is {info.dtype} {list(info.shape)}, not {rows} integers")
    with (folder / info.file).open("rb") as file:
        file.seek(info.start)
        offsets = np.frombuffer(file.read(info.end - info.start), {"I64": "<i8", "I32": "<i4"}[info.dtype])
    tokens = np.arange(rows) + offsets
    if tokens[0] < 0 or tokens[-1] >= vocab or (np.diff(tokens) <= 0).any():
        raise CheckpointError(f"drafter: {TOKENS}: the rows of its LM head are not in the order of the model's tokens")
    bits = np.zeros(int(tokens[-1]) + 1, np.uint8)
    bits[tokens] = 1
    return b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()


def ignored(model: ModelDescription, tensors: Iterable[str]) -> list[str]:
    """Return the names of tensors that no program needs.

    The model names them, or another tower has them, or they are frequencies, which old checkpoints hold for each layer
    (Llama 2) and transformers computes instead.
    """
    inside, known = model.prefix != PREFIX, {*model.ignored, *model.fixed}
    outside = (name for name in tensors if inside and not name.startswith(model.prefix))
    return [*outside, *(name for name in tensors if name in known or name.endswith(".rotary_emb.inv_freq"))]


def _same_numbers(one: TensorInfo, other: TensorInfo, source: Path) -> bool:
    """Return whether two tensors of different dtypes hold the same numbers."""
    from shardmill.convert.weights import read_info

    if one.dtype == other.dtype or one.shape != other.shape:
        return False
    pairs = (
        (read_info(info, source)[first : first + ROWS].float() for info in (one, other))
        for first in range(0, one.shape[0], ROWS)
    )
    return all(bool((mine == theirs).all()) for mine, theirs in pairs)


def _check_fixed(model: ModelDescription, tensors: Mapping[str, TensorInfo], source: Path) -> None:
    """Raise CheckpointError for a number that programs take for granted and that has another value here.

    A checkpoint may have been saved in fp16, where a small number is a multiple of FP16_STEP, and then in another type.
    """
    from shardmill.convert.weights import read_info

    for name in sorted(model.fixed.keys() & tensors.keys()):
        wanted, values = model.fixed[name], read_info(tensors[name], source).flatten().tolist()
        if len(values) != 1 or not isclose(values[0], wanted, rel_tol=BF16_STEP, abs_tol=FP16_STEP / 2):
            numbers = ", ".join(f"{value:.3g}" for value in values[:2])
            raise CheckpointError(f"tensor {printable(name)} is {numbers}: programs have {wanted} in its place")


def _refuse_foreign(model: ModelDescription, tensors: Iterable[str]) -> None:
    """Raise CheckpointError for a layout of the family that transformers does not read."""
    for name in tensors:
        for part, why in model.foreign.items():
            if part in name:
                raise CheckpointError(f"tensor {printable(name)}: {why}")


def _uncut(tensor: plan.Constant) -> str:
    """Return the label of a constant, or the name of the whole tensor if the config says how many parts share it."""
    return tensor.source.tensor if tensor.path.startswith(plan.SLICED) else tensor.label


def _model_digest(parts: Iterable[plan.Part], hashes: Mapping[str, str], files: Mapping[str, Any]) -> str:
    """Return one hash of what transformers would run: every tensor, the config and the tokenizer."""
    tensors = {name: hashes[name] for name in map(_uncut, plan.every_tensor(parts))}
    read = {name: files[name]["sha256"] for name in ("config.json", "tokenizer.json") if name in files}
    return digest({"tensors": tensors, "files": read})
