"""The program with the labels' rows of the LM head gives the logits of the whole head for the labels' tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import limits
import numpy as np
import pytest
import templates
import tiny
from models.tiny_families import write_tiny

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.convert.stamped import convert_stamped
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.interface import LABELS
from shardmill.models.part_kinds import interface
from shardmill.plan import Part
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place, label_tokens
from shardmill.runtime.program import Program

WORDS = [" return", "None", " is", "default", " not", "z", " JSON"]  # in no order of their tokens
HEADS = ("head_0", "head_1", LABELS)
# Of the last four: gains are 1 + weight, and logits are capped; a bias; a scale; a norm with a mean.
FAMILIES = ["phi3", "gemma2", "phimoe", "granite", "cohere2"]
alike = pytest.mark.skipif(not is_portable(), reason="equal to the bit on the portable engine; Core ML may differ")


def summed(width: int) -> limits.Limit:
    """The limit of a head's logits: its norm, its projection and what follows."""
    return limits.sums("fp32", width, limits.HEAD)


def program(part: Part, source: Path, folder: Path, form: str, precision: str) -> Program:
    package = folder / f"{part.name}.mlpackage"
    if not package.exists():
        convert_stamped(part, source, form, package, templates.FOLDER)
    with load_programs_as(precision):
        return Program(package, interface(part.spec))


@pytest.mark.thorough(but=["phi3-int8", "cohere2-int8", "phi3-fp16"])
@alike
@pytest.mark.parametrize(
    ("family", "form"), [(name, "int8") for name in FAMILIES] + [("phi3", "fp16"), ("phi3", "int4")]
)
def test_labels_have_the_logits_of_the_whole_head(tmp_path: Path, family: str, form: str) -> None:
    """To the bit in fp16, whatever stands between the last hidden state and the logits; fp32 sums in another order."""
    known = tiny.write_checkpoint if family == "phi3" else lambda where: write_tiny(family, where)
    source = tiny.fetched(known(tmp_path / "checkpoint"), tmp_path / "source")
    parts, plan = tiny.split(source, topology="auto", program={"labels": WORDS})
    tokenizer = read_tokenizer(source / "tokenizer.json")
    tokens = [tokenizer.encode(word).ids[0] for word in WORDS]
    assert label_tokens(plan) == tuple(tokens) and tokens != sorted(tokens)
    for precision in ("fp16", "fp32"):
        head_0, head_1, few = (program(parts[name], source, tmp_path, form, precision) for name in HEADS)
        for width in (1, 4):
            x = 3 * np.random.default_rng(width).standard_normal((1, parts["head_0"].spec.graph.hidden, width, 1))
            given = {"hidden": x.astype(np.float32)}
            whole = np.concatenate([head(given)[0, :, :, 0] for head in (head_0, head_1)])[tokens]
            found = few(given)[0, : len(tokens), :, 0]
            if precision == "fp16":
                assert np.array_equal(found, whole)
            else:
                limits.numbers_agree(
                    f"labels' logits, {width} tokens", found, whole, summed(parts["head_0"].spec.graph.hidden)
                )
            assert len(np.unique(found[:, 0])) == len(tokens) and np.ptp(found) > 0.5


@alike
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_an_engine_runs_it_in_place_of_the_head(built: tiny.Build, tmp_path: Path, precision: str) -> None:
    parts, plan = tiny.split(built.source, program={"labels": WORDS})
    own = tiny.convert(parts[LABELS], built.source, tmp_path / "labels.mlpackage")
    with load_programs_as(precision):
        manifest = in_place(plan, {**built.packages, LABELS: own}, built.table)
        loaded = Engine(json.loads(json.dumps(manifest)), Path("/"))
    found = []
    for call in (loaded.forward, loaded.forward_labels):
        loaded.reset()
        passes = [range(at, at + 4) for at in range(0, 40, 4)]
        found.append(np.concatenate([call([built.text[i] for i in at], at, at) for at in passes]))
    whole, few = found
    assert whole.shape == (40, tiny.VOCAB) and few.shape == (40, len(WORDS))
    of_whole = whole[:, list(loaded.labels)]
    if precision == "fp16":
        assert np.array_equal(few, of_whole)
    else:
        limits.numbers_agree("labels' logits", few, of_whole, summed(tiny.HIDDEN))


def test_a_build_without_labels_is_as_it_was(built: tiny.Build, tmp_path: Path) -> None:
    """Its parts have the same content, and so its packages the same bytes; only the labels' part comes to it."""
    parts, plan = tiny.split(built.source, program={"labels": WORDS})
    own = parts.pop(LABELS)
    assert {name: part.content for name, part in parts.items()} == {
        name: part.content for name, part in built.parts.items()
    }
    assert (
        plan["source"] == built.plan["source"] and "labels" not in in_place(built.plan, built.packages, Path())["uses"]
    )
    rows = [row for row in plan["parts"] if row["kind"] != LABELS]
    assert rows == built.plan["parts"] and {**plan, "parts": rows} == built.plan
    assert (own.start, own.end, own.name) == (0, 16, LABELS)
    assert replace(own, name="other").content == own.content
