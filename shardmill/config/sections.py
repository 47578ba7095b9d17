"""The sections of a config: what each setting may be, and what it is where the config does not say."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, StrictInt, Tag
from pydantic.dataclasses import dataclass

from shardmill.pydantic_errors import GIVEN

STRICT = ConfigDict(extra="forbid", str_strip_whitespace=True)

Drafter = Literal["none", "ngram", "suffix", "learned"]  # those of shardmill.decode that need no second build
DRAFTERS: tuple[Drafter, ...] = get_args(Drafter)
Index = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
Auto = Literal["auto"]


def alternative(value: object) -> str:
    """Which form a setting has that can be left to shardmill."""
    return "auto" if value == "auto" else GIVEN


Slices = Annotated[
    Annotated[StrictInt, Field(ge=1), Tag(GIVEN)] | Annotated[Auto, Tag("auto")], Discriminator(alternative)
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
    bundles: Annotated[
        Literal["one", "each"],
        Field(description="one: a compiled bundle holds all functions of a program; each: a bundle for each of them."),
    ] = "one"
    reshape_frequency: Annotated[
        Literal["infrequent", "frequent"],
        Field(
            description="How often Core ML is told that the shape of a pass changes (its hint reshapeFrequency), where "
            "one function takes several: infrequent: optimise for each shape; frequent: for changes between them."
        ),
    ] = "infrequent"


@dataclass(frozen=True, config=STRICT)
class Head:
    """The LM head."""

    slices: Annotated[
        Slices, Field(description="Programs the vocabulary is cut into, of equal size; auto: as few as fit.")
    ] = "auto"


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
        Field(min_length=1, description="Prompt lengths; those that the context has no room for are not run."),
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
        StrictInt, Field(ge=1, description="Pairs of requests per prompt and drafter, of which the median counts.")
    ] = 5
