"""Kinds of builds, each with its checkpoint and its config, and what must be seen of every one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import assistants
import heads
import mtp_layers
import sounds
import tiny
import towers
import yaml
from models import tiny_encoders, tiny_families
from processes import succeeded

from .driver import stored_here
from .project import CONFIG, ROOT, Project, steps_that

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "source": {"path": "checkpoint"},
    "context": 64,
    "parity": {"text": "text.txt", "positions": 16, "perplexity_positions": 32},
    "benchmark": {
        **{"text": "text.txt", "prompt_tokens": [16], "tasks": []},
        **{"new_tokens": 8, "repetitions": 1, "drafters": ["ngram"]},
    },
}
FORMS = {"shapes": "fixed", "state": "host", "contexts": [32], "bundles": "each"}
ENCODER = {
    **{"model": "tiny", "source": {"path": "checkpoint"}, "buckets": [16, 64]},
    "parity": {"text": "text.txt", "positions": 16, "perplexity_positions": 100},
    "benchmark": {"text": "sentences.txt", "tasks": [], "repetitions": 1},
}
GROUPS = 2
LABELS = [" not", "None", " return"]


def _assisted(folder: Path) -> Path:
    checkpoint = assistants.write(assistants.target(vocab=256), folder)
    tiny.train_tokenizer().save(str(checkpoint / "tokenizer.json"))
    return checkpoint


def _predicting(folder: Path) -> Path:
    model = mtp_layers.target("qwen3_5")  # as it is published, with its vision tower
    return mtp_layers.write(model, mtp_layers.drawn(model), folder)


@dataclass(frozen=True)
class Kind:
    """What is built, and what must be seen of it.

    Attributes:
        checkpoint: writes the checkpoint.
        settings: the config.
        eligible: parts, each with more operations than this that are predicted to run on the Neural Engine.
        told: what the report says.
        head: writes the checkpoint of a drafter, if it has one of its own.
        schema: which of the two published schemas describes model.json.
        files: of resources/text, to lie beside the config.
    """

    checkpoint: Callable[[Path], Path]
    settings: Mapping[str, Any]
    eligible: Mapping[str, int]
    told: tuple[str, ...] = ()
    head: Callable[[Path], object] | None = None
    schema: str = "model"
    files: tuple[str, ...] = ()


def drafting(drafter: object, **form: Any) -> dict[str, Any]:
    """Return the config of a build with a trained drafter."""
    return {**CONFIG, "drafter": drafter, "benchmark": {**CONFIG["benchmark"], "drafters": ["ngram"]}, **form}


KINDS = {
    "forms": Kind(
        partial(tiny.write_checkpoint, layers=2),
        {**SETTINGS, "program": FORMS},
        {"layers_00_02": 20},
        (
            "What a token takes in each context",
            "a function each for passes of 1 and 4 tokens; the host keeps keys and values",
        ),
    ),
    "experts": Kind(
        partial(tiny_families.write_tiny, "granitemoe", num_hidden_layers=1),
        {**SETTINGS, "experts": GROUPS},
        {"layers_00_01": 10, "experts_00_0": 10, "experts_00_1": 10},
        ("experts_00_1", "What a pass reads", f"{GROUPS} groups a layer", "what a Mac must measure"),
    ),
    "recurrent": Kind(
        partial(tiny_families.write_tiny, "recurrent_gemma"), {**SETTINGS, "topology": [[0, 4]]}, {"layers_00_04": 100}
    ),
    "labels": Kind(
        partial(tiny.write_checkpoint, layers=2, tied=False),
        {**SETTINGS, "program": {"labels": LABELS}, "head": {"slices": 2}},
        {"layers_00_02": 20},
        ("rows 0 to 15",),
    ),
    "adapters": Kind(
        partial(tiny.write_checkpoint, layers=2),
        {**SETTINGS, "program": {"shapes": "fixed", "state": "host", "contexts": [32], "adapters": 8}},
        {"layers_00_02": 20},
    ),
    "encoder": Kind(
        partial(tiny_encoders.write_tiny, "bert"),
        ENCODER,
        {"encoder_16": 50, "encoder_64": 50},
        ("tells apart person, email, phone", "64 tokens in one pass", "label_agreement", "span_agreement"),
        schema="encoder",
        files=("sentences.txt",),
    ),
    "chain": Kind(
        partial(tiny_encoders.write_tiny, "openai_privacy_filter"),
        # INT8 changes labels of random experts, however many programs there are.
        {**ENCODER, "topology": [[0, 1], [1, 2], [2, 3]], "convert": {"precision": "fp16"}},
        {f"encoder_{size}_{start:02d}_{start + 1:02d}": 20 for size in (16, 64) for start in range(3)},
        ("encoder_64_02_03", "layers 1 to 1", "span_agreement"),
        schema="encoder",
        files=("sentences.txt",),
    ),
    "eagle3": Kind(
        tiny.write_checkpoint,
        drafting({"path": "head"}, topology=[[0, 2], [2, 4]]),
        {"layers_00_02": 20},
        ("draft_layers",),
        heads.write_head,
    ),
    "assistant": Kind(
        _assisted,
        drafting({"path": "head"}, topology="auto", program={"state": "host"}),
        {},
        ("draft_layers",),
        lambda folder: assistants.write(assistants.assistant(vocab_size=256), folder),
    ),
    "mtp": Kind(
        _predicting, drafting("mtp", topology="auto", head={"draft_vocab_size": 128}), {}, ("draft_layers",)
    ),
    "sounds": Kind(
        sounds.write_hearing,
        {**SETTINGS, "topology": "auto", "audio": {"frames": sounds.FRAMES}},
        {"layers_00_02": 20, "tower_100": 50, "tower_300": 50},
        ("tower_300", "tower_error", "faint_error"),
    ),
    "images": Kind(
        towers.write_pictured,
        {**SETTINGS, "images": {"patches": [32, 64]}},
        {"layers_00_04": 100, "tower_32": 50, "tower_64": 50},
        ("tower_64", "tower_error", "faint_error"),
    ),
    "tiles": Kind(
        partial(towers.write_pictured, kind="smolvlm"),
        {**SETTINGS, "images": {"patches": towers.BUCKETS["smolvlm"]}},
        {"layers_00_02": 20, "tower_36": 50},
        ("tower_36", "tower_error", "faint_error"),
    ),
    "split": Kind(
        partial(towers.write_pictured, kind="lfm2_vl"),
        {**SETTINGS, "images": {"patches": towers.BUCKETS["lfm2_vl"]}},
        {"layers_00_04": 50, "tower_32": 50, "tower_64": 50},
        ("tower_64", "tower_error", "faint_error"),
    ),
}  # fmt: skip


def finished(name: str, folder: Path) -> Project:
    """Return a build of everything. The jobs' work is done in this process; Snakemake's own find it, given the same."""
    kind = KINDS[name]
    project = Project(folder / "project").create(kind.checkpoint(folder / "checkpoint"))
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(dict(kind.settings)))
    for file in kind.files:
        shutil.copyfile(ROOT / "resources/text" / file, project.folder / file)
    if kind.head:
        kind.head(project.folder / "head")
    done = stored_here(project).run("all", verbose=True)
    succeeded(done)
    assert steps_that("worked", done.stdout) == {"benchmark"}
    assert steps_that("unchanged", done.stdout) >= {"split", "embedding", "convert", "compile", "residency", "parity"}
    return project
