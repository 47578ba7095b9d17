"""A built encoder in memory: a chain of programs for each bucket, and the host's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.machine import load_programs_as
from shardmill.runtime.bundles import loadable
from shardmill.runtime.engine import EMBEDDING, read_tables
from shardmill.runtime.expected import encoder_errors, planned_operations, read_expected
from shardmill.runtime.kv import Floats
from shardmill.runtime.manifest import ENCODER, EXPECTED, bucket_of, read_manifest
from shardmill.runtime.pack import apart, bucket_for, columns, encoder_arrays
from shardmill.runtime.program import Program

EMBEDDED = "embedded"  # the input of later parts that is the first part's x


class Encoder:
    """A built encoder in memory: a chain of programs for each bucket, usually of one, and the host's tables."""

    def __init__(self, manifest: Mapping[str, Any], root: Path) -> None:
        """Load every program.

        Args:
            manifest: model.json's content.
            root: the folder that the manifest's paths are relative to.
        """
        self.manifest, self.root, self.labels = manifest, root, tuple(manifest["labels"])
        self.tables = read_tables(root / manifest["embedding"]["path"])
        self.parts = {part["name"]: part for part in manifest["parts"]}
        self.programs: dict[int, dict[str, Program]] = {}  # by bucket, and by part in the order of a pass
        for part in manifest["parts"]:
            chain = self.programs.setdefault(bucket_of(manifest, part), {})
            chain[part["name"]] = Program(root / part["program"]["path"], part)

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
        """Do what `run` does for texts that share a pass; together they must fit into the bucket."""
        return self.through([self.embedded(text) for text in texts], bucket or self.bucket(sum(map(len, texts))))

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        """Do what `run_together` does for rows [n, d] of the host's tables."""
        counts = [len(rows) for rows in texts]
        arrays = encoder_arrays(self.manifest, bucket, counts) | {"x": columns(texts, bucket)}
        arrays[EMBEDDED] = arrays["x"]
        for part in self.programs[bucket]:
            arrays["x"] = self._output(bucket, part, arrays)
        return apart(arrays["x"][0, : len(self.labels) or None, :, 0].T, counts)

    def through_part(self, part: str, bucket: int, x: Floats, embedded: Floats) -> Floats:
        """Return what one part gives for a text: [n, d] in the stream's scale, or the last part's rows.

        Args:
            part: the part's name.
            bucket: its bucket.
            x: its input, [n, d].
            embedded: the host's rows of the text, [n, d].
        """
        counts = [len(x)]
        arrays = encoder_arrays(self.manifest, bucket, counts)
        arrays |= {"x": columns([x], bucket), EMBEDDED: columns([embedded], bucket)}
        out = self._output(bucket, part, arrays)[0, :, : len(x), 0].T
        return out[:, : len(self.labels)] if self.parts[part]["output"] == "logits" else out

    def _output(self, bucket: int, part: str, arrays: Mapping[str, Floats]) -> Floats:
        """Return the output of a part's program, [1, channels, T, 1]."""
        return self.programs[bucket][part]({name: arrays[name] for name in self.parts[part]["inputs"]})

    def errors(self, part: str) -> dict[str, float]:
        """Return how far a part is from what the build says that it must give, see `expected.encoder_errors`."""
        expected = read_expected(self.root / self.manifest[EXPECTED]["path"])
        return dict(encoder_errors(self, part, expected.parts[part]))

    def operations(self, part: str) -> list[dict[str, Any]]:
        """Return Core ML's plan for each operation of a part, see `expected.planned_operations`."""
        return planned_operations(self.programs[bucket_of(self.manifest, self.parts[part])][part])


def load_encoder(build: Path, precision: str = "fp16") -> Encoder:
    """Load the encoder of a finished build folder; see `load`."""
    manifest = loadable(read_manifest(build, ENCODER), build)
    with load_programs_as(precision):
        return Encoder(manifest, build)
