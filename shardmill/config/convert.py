"""The section `convert` of a config: how programs are made, and in which form each matrix is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shardmill.config.sections import STRICT, Index, Positive
from shardmill.forms.form import FP16, INT4, INT8
from shardmill.forms.recipe import SEARCH, Recipe, recipe


@dataclass(frozen=True, config=STRICT)
class Calibration:
    """The text by which codes and forms are chosen."""

    text: Annotated[str, Field(description="UTF-8 text: quantisers see its first half, the search its second.")]
    seen: Annotated[Positive, Field(description="Windows of the first half that quantisers see.")] = 16
    held: Annotated[Positive, Field(description="Windows of the second half by which costs are measured.")] = 2
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
        Field(min_length=1, description="Those that a matrix may have: fp16, int8, int4, palette4, palette6/16 say."),
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
    search: Annotated[Search, Field(description="How `precision: search` goes about it.")] = Search()
    embedding: Annotated[
        Literal["fp16", "int8"], Field(description="The host's table of tokens; int8 has a scale for each row.")
    ] = "fp16"

    @property
    def recipe(self) -> Recipe:
        """The forms by which a build is planned: until a search has chosen, the largest that it may take."""
        if self.precision == SEARCH:
            return Recipe(FP16 if FP16 in self.search.forms else INT8)
        return recipe(self.precision)
