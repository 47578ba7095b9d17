"""Where a config's files are looked for: in the working folder, then beside the workflow."""

from __future__ import annotations

import os
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from shardmill import config
from shardmill.errors import ConfigError
from shardmill.pipeline.resolve import grounded, load_resolved, workflow_root
from shardmill.records.attest import PATHS

THERE = "resources/demo/config.json"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def nested(keys: tuple[str, ...], value: Any) -> Any:
    return reduce(lambda found, key: {key: found}, reversed(keys), value)


def at(content: Any, keys: tuple[str, ...]) -> Any:
    return reduce(lambda found, key: found[key], keys, content)


@pytest.mark.parametrize("keys", PATHS, ids=".".join)
def test_each_file_is_found_beside_the_workflow_where_it_is_not_here(keys: tuple[str, ...]) -> None:
    beside = os.path.relpath(workflow_root() / THERE)
    given = nested(keys, THERE)
    assert at(grounded(given), keys) == beside
    assert given == nested(keys, THERE)
    assert at(grounded(nested(keys, "nowhere")), keys) == "nowhere"
    Path(THERE).parent.mkdir(parents=True)
    Path(THERE).touch()
    assert at(grounded(given), keys) == THERE


def test_what_is_not_given_is_the_workflow_s_own() -> None:
    found = grounded({"benchmark": {"repeats": 1}})
    assert found["benchmark"]["repeats"] == 1
    assert Path(found["benchmark"]["text"]).is_file() and Path(found["parity"]["text"]).is_file()
    assert "source" not in found and "convert" not in found


@pytest.mark.parametrize("wrong", [None, "text", ["text"], 1])
def test_what_is_no_section_is_left_to_whoever_checks_the_config(wrong: Any) -> None:
    given = {"source": wrong, "parity": wrong, "benchmark": wrong, "convert": {"calibration": wrong}}
    assert grounded(given) == given


def test_a_config_s_file_is_read_as_a_build_reads_it() -> None:
    root = workflow_root()
    found = load_resolved(root / "configs/demo.yaml")
    assert found.source.path == os.path.relpath(root / "resources/demo")
    assert found.parity.text == os.path.relpath(root / config.Parity().text)
    Path("wrong.yaml").write_text("- a list")
    with pytest.raises(ConfigError, match="wrong.yaml: expected a mapping"):
        load_resolved(Path("wrong.yaml"))
