"""Name each problem of a config, in a line with the key and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from portable_coreml import InputError

from shardmill.checkpoint.peft import read_lora
from shardmill.config.model import Budget, Config, Head, Program, Search, Source, Tokens
from shardmill.errors import CheckpointError, ConfigError
from shardmill.forms.form import INT4, NAMES, form, is_form
from shardmill.forms.recipe import RULES, SEARCH, recipe
from shardmill.models import DECODER, hf_config
from shardmill.models.interface import ENUMERATED, FIXED, GRAPH, INFREQUENT, MTP, ONE, RANGE

TAKEN = ("index.html", "refused")  # a batch's page, and what its rule for configs that can't be built names
LONGEST = 100  # characters; files have 255, and temporary ones are called by the model and more


def problems(config: Config, root: Path) -> Iterator[str]:
    """Yield each problem of a config.

    Args:
        config: the config to check.
        root: where relative paths start.
    """
    yield from _name_problems(config.model)
    yield from _source_problems(config.source)
    yield from _kind_problems(config)
    yield from _merge_problems(config, root)
    yield from _drafter_problems(config)
    yield from _topology_problems(config)
    yield from _size_problems(config)
    yield from _contexts_problems(config)
    yield from _bundles_problems(config)
    yield from _reshape_problems(config)
    yield from _systems_problems(config)
    yield from _adapters_problems(config)
    yield from _labels_problems(config)
    yield from _images_problems(config)
    yield from _recipe_problems(config, root)
    yield from _search_problems(config)
    if config.source.path:
        length = None if config.buckets == "auto" else config.length
        for problem in hf_config.config_problems(config.source.path, root, length, config.kind):
            yield f"{problem}{_how_to_make(config, root)}"


SYNTHETIC = "-synthetic"  # how a model with another's shapes and random weights is called


def _how_to_make(config: Config, root: Path) -> str:
    """Return the command that makes the folder of a model with random weights; empty if there is none to make."""
    like = Path("configs") / f"{config.model.removesuffix(SYNTHETIC)}.yaml"
    needless = (root / str(config.source.path)).exists() or not (root / like).exists()
    if not config.model.endswith(SYNTHETIC) or needless:
        return ""
    return f"; make it: shardmill synth-checkpoint --like {like} {config.source.path}"


def _name_problems(name: str) -> list[str]:
    """Return the reason why a folder under build/ can't have a model's name."""
    if name in TAKEN:
        return [f"model: build/{name} is the workflow's own; choose another name"]
    if len(name) > LONGEST:
        return [f"model: a name has at most {LONGEST} characters, this has {len(name)}"]
    return []


def _source_problems(source: Source) -> list[str]:
    """Return the problems of the checkpoint's source."""
    if (source.path is None) == (source.repo is None):
        return ["source: give either path (a folder) or repo (the hub)"]
    if source.path and source.revision:
        return ["source.revision: only a repo has one, a path does not"]
    return []


def _merge_problems(config: Config, root: Path) -> list[str]:
    """Return the problem of an adapter that can't be merged, as far as it can be told without the checkpoint."""
    if isinstance(config.drafter, Source) and config.drafter.adapter:
        return ["drafter.adapter: a drafter has none; leave it out"]
    try:
        if config.source.adapter:
            read_lora(root / config.source.adapter)
    except CheckpointError as error:
        return [f"source.adapter: {error}"]
    return []


def _drafter_problems(config: Config) -> list[str]:
    """Return the problems of a drafter's source, and the settings that a build with a drafter can't have."""
    if config.head.draft_vocab_size and config.drafter != MTP:
        return ["head.draft_vocab_size: for `drafter: mtp` only; a checkpoint of a drafter says which tokens it drafts"]
    if config.drafter is None:
        return []
    wrong = [problem.replace("source", "drafter", 1) for one in config.sources[1:] for problem in _source_problems(one)]
    if config.convert.calibration:
        wrong.append("convert.calibration: measures the model's own chain only; leave it out, or leave out `drafter`")
    if config.witness:
        wrong.append("witness: computes the model's own parts only; leave it out, or leave out `drafter`")
    return wrong


def _kind_problems(config: Config) -> list[str]:
    """Return settings of decoders in the config of an encoder, and the other way round."""
    if config.kind == DECODER:
        strange = [f"{key}: a decoder has none" for key in ("pooling", "answers") if getattr(config, key)]
        return strange if config.context else ["context: missing"]
    if config.answers and config.pooling:
        return ["pooling: a model with `answers` gives no embeddings; leave it out"]
    if config.answers and len({*config.answers}) != max(len(config.answers), 2):
        return ["answers: give two different words or more"]
    neutral: dict[str, object] = {"context": None, "experts": "dense", "tokens": Tokens()}
    neutral |= dict.fromkeys(("images", "audio", "drafter"))
    neutral |= {
        "program": Program(silu=config.program.silu, runs_on=config.program.runs_on),
        "head": Head(),
        "predict": (),
    }
    strange = [key for key, value in neutral.items() if getattr(config, key) != value]
    if strange:
        return [f"{strange[0]}: an encoder has none; it has `buckets`"]
    repeated = len(set(config.sizes)) < len(config.sizes)
    return ["buckets: names one size twice"] if repeated else []


def _topology_problems(config: Config) -> list[str]:
    """Return gaps, overlaps and empty parts, as far as the config alone tells."""
    expected = 0
    if config.topology == "auto":
        return []
    for start, end in config.topology:
        if end <= start:
            return [f"topology: [{start}, {end}] holds no layer"]
        if start < expected:
            return [f"topology: [{start}, {end}] overlaps the part before it, which ends at {expected}"]
        if start > expected:
            one = start - expected == 1
            missing = f"layer {expected} is" if one else f"layers {expected}..{start - 1} are"
            return [f"topology: {missing} in no part"]
        expected = end
    return []


def _recipe_problems(config: Config, root: Path) -> list[str]:
    """Return the problem of a recipe that does not exist, is not valid, or does not fit the config."""
    precision, folder = config.convert.precision, (root / "build" / config.model).resolve()
    if precision not in RULES and (root / precision).resolve().is_relative_to(folder):
        return [f"convert.precision: {precision} is made by this build; copy it to another place"]
    try:
        chosen = recipe(precision if precision in RULES else str(root / precision))
    except ConfigError as error:
        return [str(error)]
    if config.convert.calibration and precision != SEARCH and INT4 not in (chosen.default, *chosen.matrices.values()):
        return [f"convert.calibration: chooses codes of int4, a form that {precision} gives no matrix; leave it out"]
    if config.program.labels and form(head := chosen.form("lm_head.weight")).kind == "palette":
        return [f"program.labels: rows of the LM head share tables in {head}; give lm_head.weight another form"]
    return []


def _search_problems(config: Config) -> list[str]:
    """Return the settings that a search lacks, or settings of a search that are given without a search."""
    convert = config.convert
    budget = convert.budget or Budget()
    budgets = [x for x in (budget.perplexity, budget.bytes_per_token, budget.bits_per_weight) if x is not None]
    if convert.calibration and config.kind != DECODER:
        return ["convert.calibration: is for decoders"]
    if convert.precision != SEARCH:
        strange = {"budget": convert.budget is not None, "search": convert.search != Search()}
        return [f"convert.{key}: is for precision: search" for key, is_given in strange.items() if is_given]
    if convert.calibration is None:
        return ["convert.calibration: missing; the search measures on its text what each form costs"]
    if len(budgets) != 1:
        return ["convert.budget: give one of perplexity, bytes_per_token, bits_per_weight"]
    unknown = [name for name in convert.search.forms if not is_form(name)]
    if unknown:
        return [f"convert.search.forms: {unknown[0]}: no form of a matrix; there are {NAMES}"]
    if len({*convert.search.forms}) < len(convert.search.forms):
        return ["convert.search.forms: names one form twice"]
    least = min(convert.search.forms, key=lambda name: form(name).bits)
    if budget.bits_per_weight is not None and budget.bits_per_weight < form(least).bits:
        return [
            f"convert.budget.bits_per_weight: {budget.bits_per_weight:g} is less than any form has; {least} is least"
        ]
    return []


def _size_problems(config: Config) -> list[str]:
    """Return settings that do not fit each other."""
    if config.context is None:
        return []
    if config.parity.positions > config.context:
        return [f"parity.positions: {config.parity.positions} is over the context of {config.context}"]
    if config.program.shapes == ENUMERATED and config.program.state == GRAPH:
        return ["program.shapes: Core ML refuses enumerated shapes beside states (rule D5); add `state: host`"]
    if config.tokens.max > config.context:
        return [f"tokens.max: {config.tokens.max} is over the context of {config.context}"]
    if config.verify > config.tokens.max:
        return [f"tokens.verify: {config.verify} is over tokens.max, {config.tokens.max}"]
    if config.tokens.max > config.parity.positions:
        tested = f"with {config.parity.positions} tokens no gate would see a pass of {config.tokens.max}"
        return [f"parity.positions: {tested}; set it to tokens.max or more"]
    return []


def _bundles_problems(config: Config) -> list[str]:
    """Return programs that can't be taken apart."""
    if config.program.bundles == ONE or config.context is None:
        return []
    if config.program.shapes != FIXED:
        return ["program.bundles: a program has one function only; add `shapes: fixed`"]
    if config.program.state == GRAPH:
        return ["program.bundles: separate bundles do not share a state; add `state: host`"]
    return []


def _reshape_problems(config: Config) -> list[str]:
    """Find a hint on shapes that never change."""
    if config.program.reshape_frequency == INFREQUENT or config.program.shapes != FIXED:
        return []
    return ["program.reshape_frequency: a function of `shapes: fixed` has one shape only; leave it out"]


def _systems_problems(config: Config) -> list[str]:
    """Find two systems that are not the oldest and the newest of one platform."""
    try:
        _ = config.systems
    except InputError as error:
        return [f"program.runs_on: {error}; name the oldest and the newest, such as [macOS 15, macOS 26]"]
    return []


def _adapters_problems(config: Config) -> list[str]:
    """Find adapters in programs whose inputs must all carry the tokens of a pass."""
    form = config.program
    if form.adapters is None or config.context is None:
        return []
    if config.witness:
        return ["program.adapters: the witness has no adapters; leave one of the two out"]
    if form.shapes == RANGE and form.state == GRAPH:
        why = "Core ML refuses inputs of one shape beside a range of shapes and states (rule D3)"
        return [f"program.adapters: {why}; add `shapes: fixed` or `state: host`"]
    return []


def _labels_problems(config: Config) -> list[str]:
    """Return why labels can't have a program, whatever the tokenizer; see also resolve.check_labels."""
    labels = config.program.labels
    if len({*labels}) < len(labels):
        return ["program.labels: names one label twice"]
    if labels and config.convert.calibration:
        return ["program.labels: codes of a calibration are chosen for the whole LM head; leave one of the two out"]
    return []


def _images_problems(config: Config) -> list[str]:
    """Return settings that a build with images or sounds can't have, whatever its model."""
    if config.tower is None:
        return []
    key, sizes = ("images", "patches") if config.images else ("audio", "frames")
    if config.images and config.audio:
        return ["audio: no model that can be built takes images as well; leave one of the two out"]
    if len({*config.tower.sizes}) < len(config.tower.sizes):
        return [f"{key}.{sizes}: names one size twice"]
    others = {"drafter": config.drafter, "convert.calibration": config.convert.calibration, "witness": config.witness}
    strange = [key for key, value in others.items() if value]
    return [f"{key}: a build has them without `{strange[0]}`; leave one of the two out"] if strange else []


def _contexts_problems(config: Config) -> list[str]:
    """Return shorter contexts that there can't be."""
    contexts = config.program.contexts
    if not contexts or config.context is None:
        return []
    if config.program.shapes != FIXED:
        return ["program.contexts: need a function for each length; add `shapes: fixed`"]
    if list(contexts) != sorted(set(contexts)):
        return [f"program.contexts: {list(contexts)} do not ascend"]
    if contexts[-1] >= config.context:
        return [f"program.contexts: {contexts[-1]} is not shorter than the context of {config.context}"]
    if contexts[0] < config.tokens.max:
        return [f"program.contexts: {contexts[0]} slots do not hold a pass of tokens.max, {config.tokens.max}"]
    return []
