"""What a part's parity is measured on: its own weights, programs and edges of the reference, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from shardmill.files import write_json
from shardmill.forms.form import matrices
from shardmill.pipeline.steps import parity, parity_stack
from shardmill.pipeline.task import Artifact
from shardmill.plan import Part, write_part

Key = Callable[..., str]
PORTABLE = {"name": "portable"}
FETCHED = {"files": {"a": {"sha256": "1"}}, "drafter": {"files": {"b": {"sha256": "2"}}}}
MAC = {"name": "coreml", "macos": "15.6", "build": "24G84", "chip": "Apple M4"}


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The action key of a part's job."""

    def of(
        plan: Any,
        part: Part,
        package: str = "p",
        bundle: str = "b",
        reference: str = "r",
        default: str = "int8",
        engine: Mapping[str, str] = PORTABLE,
        reshape: str = "infrequent",
        fetched: Mapping[str, Any] = FETCHED,
    ) -> str:
        monkeypatch.setattr(parity, "seen", lambda states, part: reference)
        write_json(tmp_path / "plan.json", dict(plan))
        write_part(tmp_path / "part.json", part)
        artifacts = (Artifact(tmp_path, sha, {}) for sha in ("states", package, bundle))
        recipe = {"schema": 1, "default": default, "matrices": {"lm_head.weight": "int8"}}
        write_json(tmp_path / "recipe.json", recipe)
        summary, piece, record = (tmp_path / name for name in ("plan.json", "part.json", "record"))
        followed = Artifact(tmp_path / "recipe.json", "recipe", {})
        write_json(record, dict(fetched))
        task = parity.task(summary, piece, followed, record, *artifacts, [], reshape, engine, {})
        assert task.action is not None
        return task.action.key

    return of


def test_a_drafters_part_is_measured_anew_with_its_other_tensors(built: tiny.Build, key: Key) -> None:
    """They make what the part is fed with, though they are no part of it."""
    plan = {**built.plan, "drafter": {"taps": [1], "rope": {}}}
    part, own = replace(built.parts["head_0"], drafter=True), built.parts["head_0"]
    others = [{**FETCHED, "drafter": {"files": {"b": {"sha256": "3"}}}}, {**FETCHED, "files": {}}]
    assert len({key(plan, part, fetched=fetched) for fetched in (FETCHED, *others)}) == 3
    assert len({key(plan, own, fetched=fetched) for fetched in (FETCHED, *others)}) == 1


@pytest.mark.parametrize("change", [{"package": "q"}, {"bundle": "q"}, {"reference": "q"}, {"reshape": "frequent"}])
def test_other_programs_and_another_reference_are_measured_anew(
    built: tiny.Build, key: Key, change: dict[str, str]
) -> None:
    part = built.parts["head_0"]
    assert key(built.plan, part, **change) != key(built.plan, part)


@pytest.mark.parametrize("engine", [MAC, MAC | {"build": "24G90"}, MAC | {"chip": "Apple M3"}])
def test_another_engine_measures_anew(built: tiny.Build, key: Key, engine: dict[str, str]) -> None:
    part = built.parts["head_0"]
    others = {key(built.plan, part), key(built.plan, part, engine=MAC | {"macos": "26.0"})}
    assert key(built.plan, part, engine=engine) not in others


def test_other_widths_are_measured_anew(built: tiny.Build, key: Key) -> None:
    part = built.parts["head_0"]
    assert key(built.plan | {"verify": 3}, part) != key(built.plan, part)


def test_other_weights_are_measured_anew_even_if_they_gave_the_same_package(built: tiny.Build, key: Key) -> None:
    """The package's weights are compared with the checkpoint's."""
    part = built.parts["layers_02_03"]
    tensors = (replace(part.tensors[0], sha256="0" * 64), *part.tensors[1:])
    assert key(built.plan, replace(part, tensors=tensors)) != key(built.plan, part)


def test_other_limits_are_measured_anew(built: tiny.Build, key: Key) -> None:
    """The forms of the part's own matrices decide them."""
    layers, head = built.parts["layers_02_03"], built.parts["head_0"]
    assert key(built.plan, layers, default="int4") != key(built.plan, layers)
    assert key(built.plan, head, default="int4") == key(built.plan, head)


def test_where_the_weights_lie_does_not_count(built: tiny.Build, key: Key) -> None:
    part = built.parts["layers_02_03"]
    moved = replace(part, tensors=tuple(replace(tensor, file="other", start=0) for tensor in part.tensors))
    assert key(built.plan, moved) == key(built.plan, part)


def test_another_embedding_in_the_checkpoint_is_measured_anew_even_if_it_gave_the_same_table(
    built: tiny.Build, tmp_path: Path
) -> None:
    """The stack's gate compares the table with the checkpoint's rows, most of which no other input depends on."""
    part = built.parts["embedding"]
    other = replace(part, tensors=(replace(part.tensors[0], sha256="0" * 64),))
    write_json(tmp_path / "plan.json", dict(built.plan))
    keys = set()
    for piece in (part, other):
        write_part(tmp_path / "embedding.json", piece)
        known = Artifact(tmp_path, "same", {})
        parts, record = [tmp_path / "embedding.json"], tmp_path / "record"
        write_json(tmp_path / "recipe.json", {"schema": 1, "default": "int8", "matrices": {}})
        recipe = Artifact(tmp_path / "recipe.json", "recipe", {})
        task = parity_stack.task(
            tmp_path / "plan.json", parts, recipe, record, known, [], [], known, [], "infrequent", PORTABLE, {}
        )
        assert task.action is not None
        keys.add(task.action.key)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("ending", "judged"), [("layers.2.self_attn.o_proj.weight", None), ("down_proj.weight", "4 bits")]
)
def test_a_stack_is_judged_by_the_forms_that_its_recipe_gives(
    built: tiny.Build, tmp_path: Path, ending: str, judged: str | None
) -> None:
    """And not by how it is written: which of the forms is the default decides nothing."""
    names = [*built.parts]
    names.sort(key=lambda name: name == "embedding")
    for name in names:
        write_part(tmp_path / f"{name}.json", built.parts[name])
    write_json(tmp_path / "plan.json", dict(built.plan))
    paths = {path for name in names[:-1] for path in matrices(built.parts[name].shapes)}
    few = {path: "int4" for path in paths if path.endswith(ending)}
    for default, named in (("int8", few), ("int4", {path: few.get(path, "int8") for path in paths})):
        recipe, known = Artifact(tmp_path / "recipe.json", "recipe", {}), Artifact(tmp_path, "same", {})
        write_json(recipe.path, {"schema": 1, "default": default, "matrices": named})
        files = [tmp_path / f"{name}.json" for name in names]
        task = parity_stack.task(
            tmp_path / "plan.json",
            files,
            recipe,
            tmp_path / "record",
            known,
            [],
            [],
            known,
            [],
            "infrequent",
            PORTABLE,
            {},
        )
        assert task.action is not None and task.action.params.get("limits") == judged
