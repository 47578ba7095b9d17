"""A config as a whole, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, get_args

from portable_coreml.judge.limits import SYSTEMS, System, between
from pydantic import ConfigDict, Discriminator, Field, StrictInt, StringConstraints, Tag
from pydantic.dataclasses import dataclass

from shardmill.checkpoint.paths import Row
from shardmill.errors import ConfigError
from shardmill.forms.form import FP16, INT4, INT8
from shardmill.forms.recipe import SEARCH, Recipe, recipe
from shardmill.models import DECODER, ENCODER
from shardmill.models.adapters import MOST_RANK
from shardmill.models.interface import DRAFT_PARTS, LABELS, RANGE, TOWER, EntryPoints

STRICT = ConfigDict(extra="forbid", str_strip_whitespace=True)

# Drafters of drafted_decoding that need no second build.
Drafter = Literal["none", "ngram", "suffix", "learned"]
DRAFTERS: tuple[Drafter, ...] = get_args(Drafter)
Index = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
Auto = Literal["auto"]
_OPTION = "(tables|sums|scales|subnormals)"
EMULATION = f"^ane(:{_OPTION}(,{_OPTION})*)?$"  # a precision of portable_coreml.run.ane
# Pydantic's names, in an error's location, for the alternatives of a key that takes a value or a word.
GIVEN, NAMED = "(given)", "(named)"


def _alternative(value: object) -> str:
    """Return the tag of a setting that can be left to shardmill: "auto" or given."""
    return "auto" if value == "auto" else GIVEN


Slices = Annotated[
    Annotated[StrictInt, Field(ge=1), Tag(GIVEN)] | Annotated[Auto, Tag("auto")], Discriminator(_alternative)
]


@dataclass(frozen=True, config=STRICT)
class Source:
    """The source of the checkpoint: a folder, or a Hugging Face repository, at a commit that is pinned or locked."""

    path: Annotated[str | None, Field(description="Folder in Hugging Face layout, relative to the project.")] = None
    repo: Annotated[str | None, Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name on the hub.")] = None
    revision: Annotated[
        str | None,
        Field(
            min_length=1,
            description="A commit, 40 hexadecimal digits; or a branch or a tag, by default the main branch, which a "
            "lock beside the config pins.",
        ),
    ] = None
    adapter: Annotated[
        str | None,
        Field(
            description="Folder of a LoRA adapter in PEFT's layout, merged into the weights before they are quantised."
        ),
    ] = None


@dataclass(frozen=True, config=STRICT)
class LockedSource(Source):
    """A repository that the config asks by a name that can move; `revision` is the commit that was resolved.

    As plain data it is the source with that commit written down, so a build by a lock has the keys of a pinned one.

    Attributes:
        asked: the branch or tag.
        files: what the hub lists at the commit.
        lock: the file that holds them.
        is_new: whether the file lacks them yet.
    """

    asked: str = "main"
    files: tuple[Row, ...] = ()
    lock: str = ""
    is_new: bool = False


@dataclass(frozen=True, config=STRICT)
class Tokens:
    """How many tokens one pass may carry."""

    max: Annotated[
        StrictInt,
        Field(
            ge=1, le=64, description="Upper bound of RangeDim T, and width of a prompt's passes; the lower bound is 1."
        ),
    ] = 4
    verify: Annotated[
        Positive | None, Field(description="Most tokens of a decode pass, drafts included; as max, but at most 8.")
    ] = None


@dataclass(frozen=True, config=STRICT)
class Program:
    """The form of the programs; which tokens are said is the same in each."""

    shapes: Annotated[
        Literal["range", "fixed", "enumerated"],
        Field(
            description="range: one function takes any pass; fixed: a function for each width, weights stored once; "
            "enumerated: one function takes passes of any of the widths."
        ),
    ] = "range"
    state: Annotated[
        Literal["graph", "host"],
        Field(description="graph: programs keep keys and values; host: they get them, and give the new rows."),
    ] = "graph"
    contexts: Annotated[
        tuple[Positive, ...],
        Field(
            max_length=8,  # every one is a function for each width, which a device compiles and the gates run
            description="Shorter numbers of key/value slots, ascending, in which texts begin; with shapes: fixed.",
        ),
    ] = ()
    adapters: Annotated[
        Positive | None,
        Field(le=MOST_RANK, description="The largest rank of LoRA adapters, which programs then take as inputs."),
    ] = None
    labels: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, strip_whitespace=False)], ...],
        Field(
            max_length=128,  # as many as a request for a decision may name
            description="Labels of one token each, for which a further program has the rows of the LM head.",
        ),
    ] = ()
    silu: Annotated[
        Literal["native", "tanh"],
        Field(
            description="native: SiLU is Core ML's own operation; tanh: it is computed from tanh, as x(1+tanh(x/2))/2."
        ),
    ] = "native"
    bundles: Annotated[
        Literal["one", "each"],
        Field(description="one: a compiled bundle holds all functions of a program; each: one function."),
    ] = "one"
    reshape_frequency: Annotated[
        Literal["infrequent", "frequent"],
        Field(
            description="How often Core ML is told that the shape of a pass changes (its hint reshapeFrequency), where "
            "one function takes several: infrequent: optimise for each shape; frequent: for changes between them."
        ),
    ] = "infrequent"
    runs_on: Annotated[
        tuple[System, System] | None,
        Field(
            description="The oldest and the newest system that the programs are for, of one platform, such as "
            "[macOS 15, macOS 26]; without it, all systems that are known."
        ),
    ] = None


@dataclass(frozen=True, config=STRICT)
class Head:
    """The LM head."""

    slices: Annotated[
        Slices, Field(description="Programs the vocabulary is cut into, of equal size; auto: as few as fit.")
    ] = "auto"
    draft_vocab_size: Annotated[
        StrictInt | None,
        Field(
            ge=16,
            description="How many of the model's tokens an MTP layer drafts, the first ones of the tokenizer; by "
            "default all, and then each draft reads the whole LM head.",
        ),
    ] = None


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
    prompt_tokens: Annotated[
        tuple[Annotated[StrictInt, Field(ge=1)], ...],
        Field(min_length=1, description="Prompt lengths; a length that does not fit into the context is not run."),
    ] = (100, 200, 372, 800)
    task_prompts: Annotated[str, Field(description="Folder with a folder of prompts per task.")] = "resources/tasks"
    tasks: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], ...],
        Field(description="Tasks to measure, by the folders in task_prompts; none where empty."),
    ] = ("code_edit", "summary", "question", "copying", "free_text")
    prompts_per_task: Annotated[
        StrictInt, Field(ge=1, description="Prompts of each task, in the order of their names.")
    ] = 3
    drafters: Annotated[
        tuple[Drafter, ...],
        Field(min_length=1, description="Each is measured against T = 1; none is T = 1 against itself."),
    ] = DRAFTERS
    new_tokens: Annotated[StrictInt, Field(ge=2, description="Tokens generated per request.")] = 80
    repetitions: Annotated[
        StrictInt, Field(ge=1, description="Pairs of requests per prompt and drafter; their median counts.")
    ] = 5


@dataclass(frozen=True, config=STRICT)
class Calibration:
    """The text that is used to choose codes and forms."""

    text: Annotated[str, Field(description="UTF-8 text: quantisers see its first half, the search its second.")]
    seen: Annotated[Positive, Field(description="Windows of the first half that quantisers see.")] = 16
    held: Annotated[Positive, Field(description="Windows of the second half on which costs are measured.")] = 2
    window: Annotated[Positive, Field(ge=8, description="Tokens of a window.")] = 512


@dataclass(frozen=True, config=STRICT)
class Budget:
    """What the search keeps to: one of these."""

    perplexity: Annotated[
        float | None,
        Field(
            gt=1.0, le=1.2, description="The perplexity's most growth as a factor, 1.03 say; no gate allows over 1.2."
        ),
    ] = None
    bytes_per_token: Annotated[
        Positive | None, Field(le=1 << 53, description="The most bytes of weights that a pass may read.")
    ] = None
    bits_per_weight: Annotated[
        float | None,
        Field(gt=0.0, le=16.0, description="The most bits of a matrix' number on average, scales included."),
    ] = None


@dataclass(frozen=True, config=STRICT)
class Search:
    """What the search chooses from, and how its estimates are checked."""

    forms: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="Forms that a matrix may have, for example fp16, int8, int4, palette4, palette6/16.",
        ),
    ] = (INT4, INT8)
    measured: Annotated[
        Index,
        Field(
            le=100,
            description="How many points of the front are measured for the report, besides the choice; 0 for none.",
        ),
    ] = 5
    windows: Annotated[
        Positive, Field(description="Windows that these are measured on, after the calibration's held ones.")
    ] = 4


@dataclass(frozen=True, config=STRICT)
class Convert:
    """How programs are made."""

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
    search: Annotated[Search, Field(description="How `precision: search` goes about it.")] = Search()
    embedding: Annotated[
        Literal["fp16", "int8"], Field(description="The host's tables of tokens; int8 has a scale for each row.")
    ] = "fp16"

    @property
    def recipe(self) -> Recipe:
        """Return the forms used to plan a build; for a search, the largest form that the search may choose."""
        if self.precision == SEARCH:
            return Recipe(FP16 if FP16 in self.search.forms else INT8)
        return recipe(self.precision)


@dataclass(frozen=True, config=STRICT)
class Audio:
    """The sounds that a request may have, and the programs that turn them into rows."""

    frames: Annotated[
        tuple[Annotated[StrictInt, Field(ge=100, le=6000)], ...],
        Field(min_length=1, max_length=8, description="Frames of 10 ms of each of the tower's programs, ascending."),
    ] = (800,)
    form: Annotated[Literal["fp16", "int8"], Field(description="The form of the tower's matrices.")] = "int8"
    most: Annotated[Positive, Field(le=64, description="Sounds in one request.")] = 4

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the frames of each program, ascending."""
        return tuple(sorted(self.frames))


@dataclass(frozen=True, config=STRICT)
class Images:
    """The images that a request may have, and the programs that turn them into rows."""

    patches: Annotated[
        tuple[Annotated[StrictInt, Field(ge=4, le=4096)], ...],
        Field(min_length=1, max_length=8, description="Patches of each of the tower's programs, ascending."),
    ] = (256, 1024)
    form: Annotated[Literal["fp16", "int8"], Field(description="The form of the tower's matrices.")] = "int8"
    most: Annotated[Positive, Field(le=64, description="Images in one request.")] = 8

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the patches of each program, ascending."""
        return tuple(sorted(self.patches))


Layers = Annotated[tuple[Index, Index], Field(description="Half-open range of layers: [first, last + 1].")]
BUCKETS = (128, 512)  # of an encoder whose config leaves them open
POINTS = ("chosen", INT4, INT8)  # sets of forms that are measured whatever the front is
VERIFY = 8  # tokens of a decode pass where a config does not say, see lab/benchmarks.md#how-wide-a-pass-verifies


def _method(value: object) -> str:
    return NAMED if isinstance(value, str) else GIVEN


def _measured(value: object) -> str:
    return NAMED if isinstance(value, bool) else GIVEN


# A topology that is left open is resolved from the model's config.json, see shardmill.pipeline.resolve.
Topology = Annotated[
    Annotated[tuple[Layers, ...], Field(min_length=1), Tag(GIVEN)] | Annotated[Auto, Tag("auto")],
    Discriminator(_alternative),
]
Experts = Annotated[
    Annotated[StrictInt, Field(ge=1), Tag(GIVEN)] | Annotated[Literal["dense", "routed"], Tag(NAMED)],
    Discriminator(_method),
]
Measured = Annotated[
    Annotated[Benchmark, Tag(GIVEN)]
    | Annotated[Literal[False], Tag(NAMED), Field(description="Without the benchmark: the report says not run.")],
    Discriminator(_measured),
]
Sizes = Annotated[
    Annotated[tuple[Annotated[StrictInt, Field(ge=1, le=8192)], ...], Field(min_length=1), Tag(GIVEN)]
    | Annotated[Auto, Tag("auto")],
    Discriminator(_alternative),
]


@dataclass(frozen=True, config=STRICT)
class Config:
    """One model to build."""

    model: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Name of the folder under build/.")]
    source: Source
    context: Annotated[
        Annotated[StrictInt, Field(ge=8)] | None, Field(description="Key/value slots S of a decoder.")
    ] = None
    buckets: Annotated[
        Sizes | None,
        Field(
            description="Tokens of each of an encoder's programs; auto: 128 and 512, or fewer if the model takes "
            "fewer; 520 in place of 512 for a model with a sliding window on both sides."
        ),
    ] = None
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        Field(
            description="Whether an embedding is the mean of all tokens' rows, the first token's row (cls) or the last "
            "token's; without it, what the checkpoint's 1_Pooling/config.json says, and mean if it has none."
        ),
    ] = None
    answers: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(
            max_length=16,
            description="For a language model that ranks: the words that it answers with, each one token. A document's "
            "score is the probability of the last.",
        ),
    ] = ()
    topology: Annotated[
        Topology, Field(description="Layers of each part, in order; auto: as few parts as fit, of even size.")
    ] = "auto"
    experts: Annotated[
        Experts,
        Field(
            description="dense: a layer's program runs all of its experts; routed: groups of experts are separate "
            "programs, which the host calls for their tokens only; a number: routed, in this number of groups a layer."
        ),
    ] = "dense"
    drafter: Annotated[
        Source | Literal["mtp"] | None,
        Field(
            description="The checkpoint of an EAGLE-3 head or of Gemma 4's assistant, which drafts for the model; mtp: "
            "the MTP layer in Qwen3.5's own checkpoint."
        ),
    ] = None
    images: Annotated[
        Images | None, Field(description="Images beside text, for a model with a tower; without it, text alone.")
    ] = None
    audio: Annotated[
        Audio | None,
        Field(description="Sounds beside text, for a model with such a tower; without it, text alone."),
    ] = None
    tokens: Tokens = Tokens()
    program: Program = Program()
    head: Head = Head()
    convert: Convert = Convert()
    parity: Parity = Parity()
    witness: Annotated[
        bool, Field(description="Whether Apple's Core AI runtime computes every part too; needs the extra `coreai`.")
    ] = False
    predict: Annotated[
        tuple[Annotated[str, Field(pattern=EMULATION)], ...],
        Field(description="For the report: precisions that predict what the Neural Engine's arithmetic costs."),
    ] = ()
    benchmark: Measured = Benchmark()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the checkpoints: the model's, then the drafter's if the drafter has a separate one."""
        return (self.source, self.drafter) if isinstance(self.drafter, Source) else (self.source,)

    @property
    def recipe(self) -> Recipe:
        """Return the forms used to plan a build, with a tower's."""
        return replace(self.convert.recipe, towers=self.tower.form) if self.tower else self.convert.recipe

    @property
    def tower(self) -> Images | Audio | None:
        """Return the settings of the tower's programs, if the build has any."""
        return self.images or self.audio

    @property
    def kind(self) -> str:
        """Return what the model is built as."""
        return DECODER if self.buckets is None else ENCODER

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the tokens of each program of an encoder, ascending; empty for a decoder."""
        return BUCKETS if self.buckets == "auto" else tuple(sorted(self.buckets or ()))

    @property
    def length(self) -> int:
        """Return how many positions the model's programs handle.

        For a decoder this is the number of slots, for an encoder the length of the longest text.
        """
        return self.context or max(self.sizes)

    @property
    def is_resolved(self) -> bool:
        """Return whether topology, groups of experts, head slices and buckets are resolved, if the kind has them."""
        if self.kind == ENCODER:
            return "auto" not in (self.topology, self.buckets)
        return "auto" not in (self.topology, self.head.slices) and self.experts != "routed"

    @property
    def groups(self) -> int:
        """Return how many programs hold the experts of a layer, once that is resolved.

        0 if the experts run in the layer's program.
        """
        if self.experts == "routed":
            raise ConfigError("experts: routed is not resolved yet")
        return 0 if self.experts == "dense" else self.experts

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the topology, once it is resolved."""
        if self.topology == "auto":
            raise ConfigError("topology: auto is not resolved yet")
        return self.topology

    @property
    def slices(self) -> int:
        """Return the number of head slices, once it is resolved."""
        if self.head.slices == "auto":
            raise ConfigError("head.slices: auto is not resolved yet")
        return self.head.slices

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of all parts, in the order in which a pass runs them, then the labels' and the drafter's.

        An encoder's pass runs the parts of one bucket; all parts of a bucket come before the next bucket's.
        """
        if self.kind == ENCODER:
            parts = () if self.topology == "auto" else self.topology  # auto: of older builds, which had one program
            cuts = [f"_{start:02d}_{end:02d}" for start, end in parts] if len(parts) > 1 else [""]
            return tuple(f"encoder_{size}{cut}" for size in self.sizes for cut in cuts)
        names: list[str] = []
        for start, end in self.ranges:
            names.append(f"layers_{start:02d}_{end:02d}")
            names += [f"experts_{end - 1:02d}_{j}" for j in range(self.groups)]
        labels, drafts = (LABELS,) if self.program.labels else (), DRAFT_PARTS if self.drafter else ()
        towers = [f"{TOWER}_{size}" for size in self.tower.sizes] if self.tower else ()
        return (*names, *(f"head_{j}" for j in range(self.slices)), *labels, *drafts, *towers)

    @property
    def systems(self) -> tuple[str, ...]:
        """Return the systems that the programs are for."""
        return between(*self.program.runs_on) if self.program.runs_on else SYSTEMS

    @property
    def points(self) -> tuple[str, ...]:
        """Return the names of the sets of forms that are measured beside each other for the report."""
        if self.convert.precision != SEARCH or not self.convert.search.measured:
            return ()
        return (*POINTS, *(f"front_{i + 1}" for i in range(self.convert.search.measured)))

    @property
    def verify(self) -> int:
        """Return the most tokens of a decode pass."""
        return self.tokens.verify or min(VERIFY, self.tokens.max)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return token counts that a runtime uses, ascending: each costs a specialisation per process."""
        return tuple(sorted({1, self.verify, self.tokens.max}))

    @property
    def calls(self) -> EntryPoints:
        """Return how a decoder's programs take passes."""
        form = self.program
        widths = () if form.shapes == RANGE else self.widths
        return EntryPoints(form.shapes, widths, form.state, form.contexts, form.adapters or 0)
