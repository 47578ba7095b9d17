"""The section `convert` of a config: how programs are made, and in which form each matrix is stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from shardmill.config.sections import STRICT, Positive


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
