"""Tiny checkpoints cut into parts, with what calibration has seen of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from models.tiny_families import tiny_text, write_tiny
from transformers import AutoModelForCausalLM

from shardmill import config, plan
from shardmill.checkpoint.headers import read_tensors
from shardmill.models import family
from shardmill.models.hf_config import load_hf_config
from shardmill.plan import Part
from shardmill.precision import calibration
from shardmill.precision.calibration import Matrix, calibrated_matrices
from shardmill.precision.original import Original, original

SLOTS, WINDOWS, HELD = 64, 3, 1


@dataclass(frozen=True)
class Case:
    """A checkpoint, cut into its layers and its head, with the states at their edges."""

    source: Path
    prefix: str
    parts: tuple[Part, ...]
    model: Original
    edges: Path
    texts: list[list[int]]

    def edge(self, part: Part) -> calibration.Edges:
        return calibration.read_edges(self.edges, part.start if part.kind == "layers" else self.model.layers)

    def matrices(self, part: Part) -> Iterator[Matrix]:
        edge = self.edge(part)
        return calibrated_matrices(part, self.source, self.model, edge.seen, edge.held)


def write_case(name: str, folder: Path) -> Case:
    """A checkpoint of a family."""
    source = write_tiny(name, folder / "checkpoint")
    hf, tensors = load_hf_config(source), read_tensors(source)
    model = family(hf.model_type).describe(hf, SLOTS)
    model = model.stored_as(tensors)
    layers = model.architecture.layers
    settings = {"model": "tiny", "source": {"path": str(source)}, "context": SLOTS}
    cut = config.parse(settings | {"topology": [[0, 1], [1, layers]], "head": {"slices": 1}})
    parts = tuple(part for part in plan.draft_parts(cut, model, tensors) if part.kind != "embedding")
    summary = {"prefix": model.prefix, "context": SLOTS, "architecture": {"tied": "lm_head.weight" not in tensors}}
    whole, file = original(source, summary), source / "edges.safetensors"
    texts = [tiny_text(26)[i : 24 + i] for i in range(WINDOWS)]
    calibration.write_edges(whole, texts[:-HELD], texts[-HELD:], (0, 1, layers), file)
    return Case(source, model.prefix, parts, whole, file, texts)


def in_memory(case: Case) -> AutoModelForCausalLM:
    """The checkpoint as transformers loads it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(case.source, dtype=torch.float32, attn_implementation="eager").eval()
