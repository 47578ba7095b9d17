"""Recipes: what a file may say, and which matrices it speaks of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import ConfigError
from shardmill.files import write_json
from shardmill.forms.recipe import called, read_recipe, recipe, recipe_misfits

SHAPES = {
    "layers.0.norm.weight": (96,),
    "layers.0.mlp.router.weight": (1, 4, 96),
    "layers.0.mlp.down_proj.weight": (96, 128),
    "lm_head.weight": (64, 96),
}
PROJECTION, HEAD, ROUTER = "layers.0.mlp.down_proj.weight", "lm_head.weight", "layers.0.mlp.router.weight"


def written(folder: Path, **content: Any) -> str:
    write_json(folder / "recipe.json", {"schema": 1, "default": "int8", "matrices": {}} | content)
    return str(folder / "recipe.json")


def test_a_matrix_whose_name_can_t_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"r\.json: '\\ud800': no matrix has such a name"):
        read_recipe({"schema": 1, "default": "int8", "matrices": {"\ud800": "int4"}}, "r.json")


def test_a_file_says_the_form_of_each_matrix(tmp_path: Path) -> None:
    found = recipe(written(tmp_path, default="palette4/32", matrices={HEAD: "int8"}))
    assert found.forms(SHAPES) == {PROJECTION: "palette4/32", HEAD: "int8"}
    assert list(recipe_misfits(found, SHAPES)) == []
    assert found.within(SHAPES) == {"schema": 1, "default": "palette4/32", "matrices": {HEAD: "int8"}}


def test_the_rules_of_thumb() -> None:
    assert recipe("int8").forms(SHAPES) == {PROJECTION: "int8", HEAD: "int8"}
    assert recipe("fp16").forms(SHAPES) == {PROJECTION: "fp16", HEAD: "fp16"}
    assert recipe("int4").forms(SHAPES) == {PROJECTION: "int4", HEAD: "int8"}
    assert not list(recipe_misfits(recipe("int4"), {PROJECTION: (96, 128)}))  # a model without a head, an encoder


def test_a_recipe_in_normal_form_names_only_what_is_no_default(tmp_path: Path) -> None:
    found = recipe(written(tmp_path, matrices={HEAD: "int8", PROJECTION: "int4"}))
    assert found.within(SHAPES)["matrices"] == {PROJECTION: "int4"}


def test_numbers_and_bytes_of_a_form_add_up(tmp_path: Path) -> None:
    """By them it is decided which limits judge a build, and a plan says what a pass reads."""
    shapes = {**SHAPES, "layers.1.mlp.down_proj.weight": (96, 130)}
    found = recipe(written(tmp_path, default="int4", matrices={HEAD: "int8"}))
    assert found.numbers(shapes) == {"int4": 96 * 128 + 96 * 130, "int8": 64 * 96}
    vectors = 2 * (96 + 4 * 96)  # the norm, and a router, which has three axes
    int4 = 96 * 128 // 2 + 96 * 130 // 2 + 2 * (96 + 96)  # a scale for each row
    assert found.bytes_by_form(shapes) == {"fp16": vectors, "int4": int4, "int8": 64 * 96 + 2 * 64}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"schema": 2}, r"recipe\.json: schema 2, this shardmill reads 1"),
        ({"default": "int3"}, r"recipe\.json: default: int3: no form of a matrix"),
        ({"default": 4}, r"recipe\.json: default: 4: no form of a matrix"),
        ({"matrices": {HEAD: "int2"}}, r"recipe\.json: lm_head\.weight: int2: no form of a matrix"),
        ({"matrices": {HEAD: None}}, r"recipe\.json: lm_head\.weight: None: no form"),
        ({"matrices": [HEAD]}, r"recipe\.json: no recipe; it has the keys schema, default and matrices"),
        ({"more": 1}, r"recipe\.json: no recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        recipe(written(tmp_path, **content))


def test_what_is_no_json_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a\.json: no JSON"):
        recipe(str(tmp_path / "a.json"))
    with pytest.raises(
        ConfigError, match=r"convert\.precision: int16 is none of fp16, int8, int4, search, and no file"
    ):
        recipe("int16")


def test_names_that_the_model_does_not_have_are_told(tmp_path: Path) -> None:
    found = recipe(written(tmp_path, matrices={"layers.7.mlp.down_proj.weight": "int4", ROUTER: "int8", HEAD: "fp16"}))
    first, second = recipe_misfits(found, SHAPES)
    assert first.startswith(f"convert.precision: {ROUTER} is no matrix of this model; it stays in fp16")
    beginning = "convert.precision: layers.7.mlp.down_proj.weight is no matrix of this model; there is "
    assert second.startswith(f"{beginning}{PROJECTION}, and ")


def test_groups_that_do_not_divide_are_told(tmp_path: Path) -> None:
    (line,) = recipe_misfits(recipe(written(tmp_path, default="palette4/96")), SHAPES)
    assert line == f"convert.precision: {HEAD}: palette4/96: its 64 output channels do not divide into groups of 96"


def test_builds_of_before_say_weights() -> None:
    assert called({"weights": "int8"}) == called({"precision": "int8"}) == "INT8"
    assert called({"precision": "recipes/best.json"}) == "mixed"


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 1, "default": "int4", "default": "int8", "matrices": {}}',
        '{"schema": 1, "default": "int4", "matrices": {"a.weight": "int8", "a.weight": "fp16"}}',
    ],
)
def test_a_name_given_twice_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.json: .* (default|a\.weight) is given twice"):
        recipe(str(tmp_path / "recipe.json"))
