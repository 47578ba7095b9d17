"""The programs of a built encoder as one function: tokens in, a row of numbers for each of them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.machine import load_programs_as
from shardmill.models.buckets import apart, arrays, bucket_for, columns
from shardmill.models.host import Floats
from shardmill.runtime.bundles import loadable
from shardmill.runtime.manifest import ENCODER, read_manifest
from shardmill.runtime.program import Program
from shardmill.runtime.table import EMBEDDING, read_tables


class Encoder:
    """A built encoder, resident: a program for each bucket, and the host's tables."""

    def __init__(self, manifest: Mapping[str, Any], root: Path) -> None:
        """Loads every program.

        Args:
            manifest: model.json's content.
            root: the folder that its paths start from.
        """
        self.manifest, self.labels = manifest, tuple(manifest["labels"])
        self.tables = read_tables(root / manifest["embedding"]["path"])
        self.programs: dict[int, Program] = {}
        self.inputs: dict[int, list[str]] = {}
        for bucket, part in zip(manifest["buckets"], manifest["parts"], strict=True):
            self.programs[bucket] = Program(root / part["program"]["path"], stateful=False)
            self.inputs[bucket] = list(part["inputs"])

    @property
    def longest(self) -> int:
        """The most tokens of a pass."""
        return max(self.programs)

    def bucket(self, count: int) -> int:
        """The bucket that so many tokens go through. Raises ValueError for more than fit."""
        return bucket_for(tuple(self.programs), count)

    def embedded(self, tokens: Sequence[int]) -> Floats:
        """The host's rows [n, d] of tokens at positions 0 .. n - 1."""
        rows = self.tables[EMBEDDING][list(tokens)]
        if "positions" in self.tables:
            rows += self.tables["positions"][: len(tokens)]
        if "types" in self.tables:
            rows += self.tables["types"][0]  # a single text is of the first type
        return rows

    def run(self, tokens: Sequence[int], bucket: int | None = None) -> Floats:
        """A row for each token of a text: logits of the labels [n, labels], or hidden states [n, d].

        Args:
            tokens: at most as many as the largest bucket takes.
            bucket: the program that takes them; the smallest that can, if left out.

        Raises:
            ValueError: for more tokens than fit.
        """
        (rows,) = self.run_together([tokens], bucket)
        return rows

    def run_together(self, texts: Sequence[Sequence[int]], bucket: int | None = None) -> list[Floats]:
        """`run` of texts that share a pass: together they have at most as many tokens as the bucket takes."""
        return self.through([self.embedded(text) for text in texts], bucket or self.bucket(sum(map(len, texts))))

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        """`run_together` for rows [n, d] of the host's tables."""
        counts = [len(rows) for rows in texts]
        given = arrays(self.manifest, bucket, counts) | {"x": columns(texts, bucket)}
        out = self.programs[bucket]({name: given[name] for name in self.inputs[bucket]})  # [1, rows, T, 1]
        return apart(out[0, : len(self.labels) or None, :, 0].T, counts)


def load(build: Path, precision: str = "fp16") -> Encoder:
    """The encoder of a finished build folder.

    Args:
        build: the folder.
        precision: the portable engine's, "fp16" as the Neural Engine computes or "fp32"; Core ML has no choice.

    Raises:
        ShardmillError: where the folder holds no finished build of an encoder.
    """
    manifest = loadable(read_manifest(build, ENCODER), build)
    with load_programs_as(precision):
        return Encoder(manifest, build)
