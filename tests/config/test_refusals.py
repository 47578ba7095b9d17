"""A config that can't be built from is refused in one line, before any work."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shardmill import config
from shardmill.errors import ConfigError
from shardmill.models.hf_config import SIZES
from shardmill.pipeline import options
from shardmill.pipeline.needs import STEPS

from .wrong import WRONG, local, refusal, settings


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_in_one_line(name: str) -> None:
    """Each mistake is refused by the line that names its key, and a right config is not."""
    changes, expected = WRONG[name]
    assert refusal(settings(**changes)).startswith(expected)
    config.parse(settings())


def test_a_missing_key_is_named() -> None:
    """A required key that is left out is an error that names it."""
    content = settings()
    del content["context"]
    assert refusal(content) == "context: missing"


def test_a_batch_where_one_model_is_asked_for_is_told() -> None:
    """`shardmill why` and `plan` are about one; its missing keys would say nothing."""
    assert refusal({"batch": ["a.yaml"]}) == "a batch of several models; give the config of one model"


@pytest.mark.parametrize("letter", ["\0", "\ud800"])
def test_a_character_that_no_file_s_name_can_have_is_refused(letter: str) -> None:
    for changes in ({"model": letter}, {"convert": {"precision": letter}}, {"benchmark": {"tasks": [letter]}}):
        assert refusal(settings(**changes)) == "holds a character that no file's name can have"


def test_a_build_may_leave_out_its_benchmark() -> None:
    """Also as settings, which attestations hold and rebuild from."""
    found = config.parse(settings(benchmark=False, head={"slices": 1}))
    assert found.benchmark is False and config.config_of(options.settings(found)) == found
    wanted = STEPS["benchmark"].wanted
    assert wanted and not wanted(found) and wanted(config.parse(settings(head={"slices": 1})))
    with pytest.raises(ConfigError, match="m: its config has `benchmark: false`; remove that to measure its speed"):
        options.task_files(found)


def test_several_mistakes_are_all_named() -> None:
    """One run tells of every key that is wrong, not of the first only."""
    line = refusal(settings(contxt=5, tokens={"max": 0}))
    assert "contxt: unknown key" in line
    assert "tokens.max" in line


def test_a_local_checkpoint_is_held_against_the_context(tmp_path: Path) -> None:
    """More slots than the model has positions are refused before anything runs."""
    config.parse(local(tmp_path))
    refused = refusal(local(tmp_path, max_position_embeddings=63))
    assert refused == "context: 64 is over the model's 63 positions"


def test_labels_keep_their_spaces(tmp_path: Path) -> None:
    found = config.parse(local(tmp_path) | {"head": {"slices": 1}, "program": {"labels": [" return", "None"]}})
    assert found.program.labels == (" return", "None")
    assert found.parts == ("layers_00_02", "layers_02_04", "head_0", "labels")


def test_a_head_in_a_palette_has_no_labels(tmp_path: Path) -> None:
    """Its rows share a table, and other rows would choose another."""
    recipe = {"schema": 1, "default": "int8", "matrices": {"lm_head.weight": "palette8"}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    changed = settings(convert={"precision": str(tmp_path / "recipe.json")})
    config.parse(changed)
    line = refusal(changed | {"program": {"labels": [" yes"]}})
    assert line == "program.labels: rows of the LM head share tables in palette8; give lm_head.weight another form"


def test_a_model_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    line = refusal(local(tmp_path, model_type="gpt_2"))
    assert line.startswith(f"{tmp_path}/config.json: model_type 'gpt_2' is not supported; supported: ")
    assert {"llama", "phi3"} <= set(re.findall(r"\w+", line))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_size_that_is_null_stands_for_its_default(tmp_path: Path, name: str) -> None:
    """What that is, only transformers knows: the split step asks it."""
    content = local(tmp_path, head_dim=None, **{name: None})
    config.parse(content)


def test_a_negative_layer_is_one_error() -> None:
    """That its list has no sound item left follows from it and is not said."""
    assert refusal(settings(topology=[[-1, 2]])).count(";") == 0


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, "4", True, 1.5])
def test_a_size_that_is_none_is_named(tmp_path: Path, name: str, value: Any) -> None:
    """A model of no heads divides by zero somewhere else."""
    assert f"{name} is {value!r}: it must be 1 or more" in refusal(local(tmp_path, **{name: value}))


@pytest.mark.parametrize(("reader", "what"), [("shardmill.files.os.open", "config.json"), ("os.listdir", "")])
def test_a_checkpoint_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, what: str
) -> None:
    content = local(tmp_path)

    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as closed:
        closed.setattr(reader, refuse)
        found = refusal(content)
    assert found == f"source.path: {tmp_path / what} can't be read: Permission denied"


def test_a_checkpoint_s_config_that_is_not_utf8(tmp_path: Path) -> None:
    content = local(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    assert refusal(content).startswith(f"{tmp_path}/config.json: not JSON")


def test_the_config_of_a_model_is_found_among_broken_files(tmp_path: Path) -> None:
    """A file that is no config is not the one that was asked for."""
    (tmp_path / "a.yaml").write_text("model: [unclosed\ncontext: 5\n")
    (tmp_path / "b.yaml").write_text("- model\n- m\n")
    (tmp_path / "c.yaml").write_bytes(b"model: \xff")
    (tmp_path / "d.yaml").write_text("model: m\n")
    assert config.find_config("m", tmp_path) == tmp_path / "d.yaml"
    with pytest.raises(ConfigError, match="none names the model n"):
        config.find_config("n", tmp_path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    """A missing file, one that is no YAML and one that is no mapping each give one line that names the file."""
    broken, plain, binary = (tmp_path / f"{name}.yaml" for name in ("broken", "plain", "binary"))
    binary.write_bytes(b"model: \xff\xfe")
    broken.write_text("model: [unclosed\ncontext: 5\n")
    plain.write_text("just words")
    for file in (tmp_path / "missing.yaml", broken, plain, binary):
        with pytest.raises(ConfigError) as caught:
            config.load(file)
        assert str(caught.value).startswith(f"{file}: ")
        assert "\n" not in str(caught.value)


def test_parts_and_widths() -> None:
    """Parts are named as the rules name their files, in the order of a pass; T = 1, verify and max are widths."""
    c = config.parse(settings(topology=[[0, 20], [20, 24]], head={"slices": 2}))
    assert c.parts == ("layers_00_20", "layers_20_24", "head_0", "head_1")
    assert c.widths == (1, 4)
    for tokens, widths in (
        ({"max": 1}, (1,)),
        ({"max": 3}, (1, 3)),
        ({"max": 64}, (1, 8, 64)),
        ({"max": 6}, (1, 6)),
        ({"max": 64, "verify": 8}, (1, 8, 64)),
        ({"max": 16, "verify": 1}, (1, 16)),
        ({"max": 16, "verify": 16}, (1, 16)),
    ):
        assert config.parse(settings(tokens=tokens)).widths == widths


def test_what_is_left_open_has_no_parts_yet() -> None:
    """Left out or `auto`; either of the two is enough to know no names of parts."""
    for changes in ({"topology": "auto"}, {"head": {"slices": "auto"}}):
        c = config.parse(settings(head={"slices": 2}) | changes)
        assert not c.is_resolved
        with pytest.raises(ConfigError, match="auto is not resolved yet"):
            len(c.parts)
    content = settings()
    del content["topology"]
    assert (config.parse(content).topology, config.parse(content).head.slices) == ("auto", "auto")
    assert config.parse(settings(head={"slices": 2})).is_resolved
