"""configs/*.yaml -> validated, frozen dataclasses.

Whatever can be known to be wrong is wrong here, in one line that names the file, the key and the remedy, before any
work starts. Keys that do not exist are errors. configs/schema.json is this module's schema, for editors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, StrictInt, Tag, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from shardmill.errors import ConfigError
from shardmill.forms.recipe import RULES, SEARCH, recipe
from shardmill.models import DECODER, ENCODER, local
from shardmill.pydantic_errors import GIVEN, NAMED, describe_all
from shardmill.yamlfile import read_yaml

STRICT = ConfigDict(extra="forbid", str_strip_whitespace=True)
COMMIT = re.compile(r"[0-9a-f]{40}")
HOW_TO_PIN = "git ls-remote https://huggingface.co/{repo} HEAD"

Drafter = Literal["none", "ngram", "suffix", "learned"]  # those of shardmill.decode that need no second build
DRAFTERS: tuple[Drafter, ...] = get_args(Drafter)
Index = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
Layers = Annotated[tuple[Index, Index], Field(description="Half-open range of layers: [first, last + 1].")]
Auto = Literal["auto"]
OLD_KEY, NEW_KEY = "weights", "precision"  # of `convert`
BUCKETS = (128, 512)  # of an encoder whose config leaves them open
VERIFY = 4  # tokens of a decode pass where a config does not say, see configs/README.md


def _alternative(value: object) -> str:
    return "auto" if value == "auto" else GIVEN


def _method(value: object) -> str:
    return NAMED if isinstance(value, str) else GIVEN


# One that is left open is settled by what the model's config.json says, see shardmill.pipeline.settle.
Topology = Annotated[
    Annotated[tuple[Layers, ...], Field(min_length=1), Tag(GIVEN)] | Annotated[Auto, Tag("auto")],
    Discriminator(_alternative),
]
Slices = Annotated[
    Annotated[StrictInt, Field(ge=1), Tag(GIVEN)] | Annotated[Auto, Tag("auto")], Discriminator(_alternative)
]


Experts = Annotated[
    Annotated[StrictInt, Field(ge=1), Tag(GIVEN)] | Annotated[Literal["dense", "routed"], Tag(NAMED)],
    Discriminator(_method),
]
Sizes = Annotated[
    Annotated[tuple[Annotated[StrictInt, Field(ge=1, le=8192)], ...], Field(min_length=1), Tag(GIVEN)]
    | Annotated[Auto, Tag("auto")],
    Discriminator(_alternative),
]


@dataclass(frozen=True, config=STRICT)
class Source:
    """Where the checkpoint comes from: a folder, or a Hugging Face repository at a pinned commit."""

    path: Annotated[str | None, Field(description="Folder in Hugging Face layout, relative to the project.")] = None
    repo: Annotated[str | None, Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name on the hub.")] = None
    revision: Annotated[str | None, Field(description="Commit of the repository, 40 hexadecimal digits.")] = None


@dataclass(frozen=True, config=STRICT)
class Tokens:
    """How many tokens one pass may carry."""

    max: Annotated[
        StrictInt,
        Field(ge=1, le=64, description="Upper bound of RangeDim T, by which prompts are fed; the lower bound is 1."),
    ] = 4
    verify: Annotated[
        Positive | None, Field(description="Most tokens of a decode pass, drafts included; as max, but at most 4.")
    ] = None


@dataclass(frozen=True, config=STRICT)
class Head:
    """The LM head."""

    slices: Annotated[
        Slices, Field(description="Programs the vocabulary is cut into, of equal size; auto: as few as fit.")
    ] = "auto"


@dataclass(frozen=True, config=STRICT)
class Calibration:
    """The text by which codes and forms are chosen."""

    text: Annotated[str, Field(description="UTF-8 text: quantisers see its first half, the search its second.")]
    seen: Annotated[Positive, Field(description="Windows of the first half that quantisers see.")] = 16
    held: Annotated[Positive, Field(description="Windows of the second half by which costs are measured.")] = 2
    window: Annotated[Positive, Field(description="Tokens of a window.")] = 512


@dataclass(frozen=True, config=STRICT)
class Budget:
    """What the search keeps to: one of these."""

    perplexity: Annotated[
        float | None, Field(gt=1.0, description="The perplexity's most growth as a factor, 1.03 say.")
    ] = None
    bytes_per_token: Annotated[
        Positive | None, Field(description="The most bytes of weights that a pass may read.")
    ] = None
    bits_per_weight: Annotated[
        float | None, Field(gt=0.0, description="The most bits of a matrix' number on average, scales included.")
    ] = None


@dataclass(frozen=True, config=STRICT)
class Convert:
    """How programs are made."""

    method: Annotated[
        Literal["stamped", "plain"],
        Field(description="stamped: one template per layer graph, weights streamed; plain: all by coremltools."),
    ] = "stamped"
    precision: Annotated[
        str,
        Field(
            description="fp16, int8, int4 (with the head in int8); search; or a recipe, each matrix' form: a JSON file."
        ),
    ] = "int8"
    calibration: Annotated[
        Calibration | None, Field(description="The text that int4 codes are fitted to; without it they are rounded.")
    ] = None
    budget: Annotated[Budget | None, Field(description="What `precision: search` keeps to.")] = None
    embedding: Annotated[
        Literal["fp16", "int8"], Field(description="The host's table of tokens; int8 has a scale for each row.")
    ] = "fp16"


@dataclass(frozen=True, config=STRICT)
class Parity:
    """What the parity gates run on."""

    text: Annotated[str, Field(description="Text file whose tokens are fed.")] = "resources/text/parity.txt"
    positions: Annotated[StrictInt, Field(ge=8, description="Tokens compared, from the start of the text.")] = 64
    perplexity_positions: Annotated[StrictInt, Field(ge=8, description="Tokens for KL, top-1 and perplexity.")] = 256


@dataclass(frozen=True, config=STRICT)
class Benchmark:
    """What the benchmark measures: every drafter on the text tiled to each length, and on every task's prompts."""

    text: Annotated[str, Field(description="Dense code, tiled to each prompt length.")] = "resources/text/code.txt"
    prompt_tokens: Annotated[tuple[Annotated[StrictInt, Field(ge=1)], ...], Field(min_length=1)] = (100, 200, 372, 800)
    task_prompts: Annotated[str, Field(description="Folder with a folder of prompts per task.")] = "resources/tasks"
    tasks: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], ...] = (
        "code_edit", "summary", "question", "copying", "free_text",
    )  # fmt: skip
    prompts_per_task: Annotated[StrictInt, Field(ge=1)] = 3
    drafters: Annotated[
        tuple[Drafter, ...],
        Field(min_length=1, description="Each is measured against T = 1; none is T = 1 against itself."),
    ] = DRAFTERS
    new_tokens: Annotated[StrictInt, Field(ge=2)] = 80
    repetitions: Annotated[StrictInt, Field(ge=1)] = 5


@dataclass(frozen=True, config=STRICT)
class Config:
    """One model to build."""

    model: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Name of the folder under build/.")]
    source: Source
    context: Annotated[
        Annotated[StrictInt, Field(ge=8)] | None, Field(description="Key/value slots S of a decoder.")
    ] = None
    buckets: Annotated[
        Sizes | None, Field(description="Tokens of each of an encoder's programs; auto: 128 and 512.")
    ] = None
    pooling: Annotated[
        Literal["mean", "cls"], Field(description="What an embedding is made of: all tokens' rows, or the first.")
    ] = "mean"
    topology: Annotated[
        Topology, Field(description="Layers of each part, in order; auto: as few parts as fit, of even size.")
    ] = "auto"
    experts: Annotated[
        Experts,
        Field(
            description="dense: all of a layer's experts run in its program; routed: groups of them are programs of "
            "their own, which the host calls for tokens that take them; a number: routed, in so many groups a layer."
        ),
    ] = "dense"
    tokens: Tokens = Tokens()
    head: Head = Head()
    convert: Convert = Convert()
    parity: Parity = Parity()
    benchmark: Benchmark = Benchmark()

    @property
    def kind(self) -> str:
        """What the model is built as."""
        return DECODER if self.buckets is None else ENCODER

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each of an encoder's programs, ascending; none for a decoder."""
        return BUCKETS if self.buckets == "auto" else tuple(sorted(self.buckets or ()))

    @property
    def length(self) -> int:
        """How many positions of the model programs deal with: a decoder's slots, or an encoder's longest text."""
        return self.context or max(self.sizes)

    @property
    def is_settled(self) -> bool:
        """Whether neither topology, groups of experts nor head slices are left open; an encoder has none of them."""
        open_ones = "auto" in (self.topology, self.head.slices) or self.experts == "routed"
        return self.kind == ENCODER or not open_ones

    @property
    def groups(self) -> int:
        """How many programs hold the experts of a layer, once that is settled; 0 where they run in the layer's own."""
        if self.experts == "routed":
            raise ConfigError("experts: routed is not settled yet")
        return 0 if self.experts == "dense" else self.experts

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The topology, once it is settled."""
        if self.topology == "auto":
            raise ConfigError("topology: auto is not settled yet")
        return self.topology

    @property
    def slices(self) -> int:
        """The number of head slices, once it is settled."""
        if self.head.slices == "auto":
            raise ConfigError("head.slices: auto is not settled yet")
        return self.head.slices

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts, in the order in which a pass runs them; an encoder's pass runs one of them."""
        if self.kind == ENCODER:
            return tuple(f"encoder_{size}" for size in self.sizes)
        found: list[str] = []
        for start, end in self.ranges:
            found.append(f"layers_{start:02d}_{end:02d}")
            found += [f"experts_{end - 1:02d}_{j}" for j in range(self.groups)]
        return (*found, *(f"head_{j}" for j in range(self.slices)))

    @property
    def verify(self) -> int:
        """The most tokens of a decode pass."""
        return self.tokens.verify or min(VERIFY, self.tokens.max)

    @property
    def widths(self) -> tuple[int, ...]:
        """Token counts that a runtime uses, ascending: each costs a specialisation per process."""
        return tuple(sorted({1, self.verify, self.tokens.max}))


def load(path: Path, root: Path = Path(".")) -> Config:
    """The config in the file `path`; raises ConfigError. `root` is where relative paths in it start."""
    return parse(read_yaml(path), str(path), root)


def find(model: str, folder: Path = Path("configs")) -> Path:
    """The config in `folder` that names a model; raises ConfigError where none or more than one does."""
    named = [file for file in sorted(folder.glob("*.yaml")) if _model_of(file) == model]
    if len(named) != 1:
        found = ", ".join(map(str, named)) or "none"
        raise ConfigError(f"{folder}: {found} names the model {model}; say which with --configfile")
    return named[0]


def _model_of(path: Path) -> Any:
    """The model that a config names; None for a file that is no config, which is not the one to look for."""
    try:
        content = read_yaml(path)
    except ConfigError:
        return None
    return content.get("model") if isinstance(content, Mapping) else None


def parse(content: Any, name: str = "config", root: Path = Path(".")) -> Config:
    """A mapping (as Snakemake hands it over) as a Config; raises ConfigError with `name` in front."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name}: expected a mapping of keys, see configs/README.md")
    try:
        config = TypeAdapter(Config).validate_python(_renamed(content, name))
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe_all(error)}") from error
    for problem in (
        *_source_problems(config.source),
        *_kind_problems(config),
        *_topology_problems(config),
        *_size_problems(config),
        *_recipe_problems(config, root),
        *_search_problems(config),
        *(local.problems(config.source.path, root, config.length, config.kind) if config.source.path else ()),
    ):
        raise ConfigError(f"{name}: {problem}")
    return config


def _renamed(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content with `convert.precision` for `convert.weights`, as that was called. Raises ConfigError for both."""
    convert = content.get("convert")
    if not isinstance(convert, Mapping) or OLD_KEY not in convert:
        return dict(content)
    if NEW_KEY in convert:
        raise ConfigError(f"{name}: convert.{OLD_KEY}: is the old name of convert.{NEW_KEY}; keep that alone")
    rest = {key: value for key, value in convert.items() if key != OLD_KEY}
    return {**content, "convert": rest | {NEW_KEY: convert[OLD_KEY]}}


def checked(settings: Mapping[str, Any]) -> Config:
    """The config of settings that were looked at before the work began, or of a part of them."""
    return TypeAdapter(Config).validate_python(dict(settings))


def _source_problems(source: Source) -> list[str]:
    """What is wrong with where the checkpoint comes from."""
    if (source.path is None) == (source.repo is None):
        return ["source: give either path (a folder) or repo and revision (the hub)"]
    if source.repo and not COMMIT.fullmatch(source.revision or ""):
        how = HOW_TO_PIN.format(repo=source.repo)
        return [f"source.revision: needs the repository's commit, 40 hexadecimal digits; `{how}` prints it"]
    if source.path and source.revision:
        return ["source.revision: only a repo has one, a path does not"]
    return []


def _kind_problems(config: Config) -> list[str]:
    """Settings of decoders in the config of an encoder, and the other way round."""
    if config.kind == DECODER:
        strange = ["pooling: a decoder has none"] if config.pooling != "mean" else []
        return strange if config.context else ["context: missing"]
    neutral = {"context": None, "topology": "auto", "experts": "dense", "tokens": Tokens(), "head": Head()}
    strange = [key for key, value in neutral.items() if getattr(config, key) != value]
    if strange:
        return [f"{strange[0]}: an encoder has none; it has `buckets`"]
    repeated = len(set(config.sizes)) < len(config.sizes)
    return ["buckets: names one size twice"] if repeated else []


def _topology_problems(config: Config) -> list[str]:
    """Gaps, overlaps and empty parts, as far as the config alone tells."""
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
    """A recipe that there is none of, or that does not read as one."""
    precision = config.convert.precision
    try:
        recipe(precision if precision in RULES else str(root / precision))
    except ConfigError as error:
        return [str(error)]
    return []


def _search_problems(config: Config) -> list[str]:
    """A search without what it needs, or what it needs without a search."""
    convert = config.convert
    budget = convert.budget or Budget()
    given = [x for x in (budget.perplexity, budget.bytes_per_token, budget.bits_per_weight) if x is not None]
    if convert.calibration and config.kind != DECODER:
        return ["convert.calibration: is for decoders"]
    if convert.precision != SEARCH:
        return ["convert.budget: is for precision: search"] if convert.budget else []
    if convert.calibration is None:
        return ["convert.calibration: missing; the search measures on its text what each form costs"]
    if len(given) != 1:
        return ["convert.budget: give one of perplexity, bytes_per_token, bits_per_weight"]
    return []


def _size_problems(config: Config) -> list[str]:
    """Settings that do not fit each other."""
    if config.context is None:
        return []
    if config.parity.positions > config.context:
        return [f"parity.positions: {config.parity.positions} is over the context of {config.context}"]
    if config.tokens.max > config.context:
        return [f"tokens.max: {config.tokens.max} is over the context of {config.context}"]
    if config.verify > config.tokens.max:
        return [f"tokens.verify: {config.verify} is over tokens.max, {config.tokens.max}"]
    if config.tokens.max > config.parity.positions:
        tested = f"{config.parity.positions} tokens, by which no gate would see a pass of {config.tokens.max}"
        return [f"parity.positions: {tested}; set it to tokens.max or more"]
    return []


def schema() -> dict[str, Any]:
    """JSON schema of a config file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(Config).json_schema()}
