"""A built encoder in memory: a program for each bucket, and the host's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.machine import load_programs_as
from shardmill.runtime.bundles import loadable
from shardmill.runtime.engine import EMBEDDING, read_tables
from shardmill.runtime.expected import encoder_errors, planned_operations, read_expected
from shardmill.runtime.kv import Floats
from shardmill.runtime.manifest import ENCODER, EXPECTED, read_manifest
from shardmill.runtime.pack import apart, bucket_for, columns, encoder_arrays
from shardmill.runtime.program import Program


class Encoder:
    """A built encoder in memory: a program for each bucket, and the host's tables."""

    def __init__(self, manifest: Mapping[str, Any], root: Path) -> None:
        """Load every program.

        Args:
            manifest: model.json's content.
            root: the folder that the manifest's paths are relative to.
        """
        self.manifest, self.root, self.labels = manifest, root, tuple(manifest["labels"])
        self.tables = read_tables(root / manifest["embedding"]["path"])
        self.programs: dict[int, Program] = {}
        self.inputs: dict[int, list[str]] = {}
        for bucket, part in zip(manifest["buckets"], manifest["parts"], strict=True):
            self.programs[bucket] = Program(root / part["program"]["path"], part)
            self.inputs[bucket] = list(part["inputs"])

    @property
    def longest(self) -> int:
        """Return the most tokens of a pass."""
        return max(self.programs)

    def bucket(self, count: int) -> int:
        """Return the bucket for `count` tokens. Raises ValueError if none is large enough."""
        return bucket_for(tuple(self.programs), count)

    def embedded(self, tokens: Sequence[int]) -> Floats:
        """Return the host's rows [n, d] for tokens at positions 0 .. n - 1."""
        rows = self.tables[EMBEDDING][list(tokens)]
        if "positions" in self.tables:
            rows += self.tables["positions"][: len(tokens)]
        if "types" in self.tables:
            rows += self.tables["types"][0]  # a single text has only the first type
        return rows

    def run(self, tokens: Sequence[int], bucket: int | None = None) -> Floats:
        """Return a row for each token of a text: logits of the labels [n, labels], or hidden states [n, d].

        Args:
            tokens: the text's tokens, at most the size of the largest bucket.
            bucket: the bucket whose program runs; by default the smallest one that is large enough.

        Raises:
            ValueError: if the text is too long.
        """
        (rows,) = self.run_together([tokens], bucket)
        return rows

    def run_together(self, texts: Sequence[Sequence[int]], bucket: int | None = None) -> list[Floats]:
        """Do the same as `run` for texts that share a pass; together they must fit into the bucket."""
        return self.through([self.embedded(text) for text in texts], bucket or self.bucket(sum(map(len, texts))))

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        """Do the same as `run_together` for rows [n, d] of the host's tables."""
        counts = [len(rows) for rows in texts]
        given = encoder_arrays(self.manifest, bucket, counts) | {"x": columns(texts, bucket)}
        out = self.programs[bucket]({name: given[name] for name in self.inputs[bucket]})  # [1, rows, T, 1]
        return apart(out[0, : len(self.labels) or None, :, 0].T, counts)

    def errors(self, part: str) -> dict[str, float]:
        """Return how far a part is from what the build says that it must give, see `expected.encoder_errors`."""
        expected = read_expected(self.root / self.manifest[EXPECTED]["path"])
        return dict(encoder_errors(self, part, expected.parts[part]))

    def operations(self, part: str) -> list[dict[str, Any]]:
        """Return Core ML's plan for each operation of a part, see `expected.planned_operations`."""
        return planned_operations({program.name: program for program in self.programs.values()}[part])


def load_encoder(build: Path, precision: str = "fp16") -> Encoder:
    """Load the encoder of a finished build folder; see `load`."""
    manifest = loadable(read_manifest(build, ENCODER), build)
    with load_programs_as(precision):
        return Encoder(manifest, build)
