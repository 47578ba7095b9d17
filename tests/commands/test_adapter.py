"""`shardmill adapter` and `--adapter`: added, listed, used and removed by name."""

from __future__ import annotations

import json
from pathlib import Path

import adapters
import pytest
import tiny
from reciter import failure, shardmill
from shared import once

from shardmill.machine import is_portable

pytestmark = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
PROMPT = "def loads(s, *, cls=None"


@pytest.fixture(scope="module")
def build() -> Path:
    return once("adapters-build", lambda folder: adapters.build(folder, "phi3"))


@pytest.mark.thorough
def test_generate_says_what_the_merged_model_says(build: Path, tmp_path: Path) -> None:
    lora = adapters.write_lora(build / "source", tmp_path / "lora", 3, 0.25)
    added = shardmill("adapter", "add", build, lora, "--name", "told")
    assert added.exit_code == 0, added.output
    assert added.stdout.startswith(f"told: rank 4, changes {4 * tiny.LAYERS} modules of ")
    assert "told" in shardmill("adapter", "list", build).stdout
    tokens = tiny.train_tokenizer().encode(PROMPT).ids
    given = ("generate", build, "--prompt", PROMPT, "--max-new-tokens", 10, "--json")
    for options, model in {
        ("--adapter", "told"): adapters.merged(build / "source", lora),
        (): tiny.transformers_model(build / "source"),
    }.items():
        result = shardmill(*given, *options)
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)["tokens"]
        assert said == adapters.greedy(model, tokens, 10)[: len(said)]
    assert shardmill("adapter", "remove", build, "told").exit_code == 0
    assert "told" not in shardmill("adapter", "list", build).stdout


def test_an_adapter_that_takes_another_s_place_is_told(build: Path, tmp_path: Path) -> None:
    lora = adapters.write_lora(build / "source", tmp_path / "lora", 3, 0.25)
    said = [shardmill("adapter", "add", build, lora, "--name", "twice") for _ in range(2)]
    assert shardmill("adapter", "remove", build, "twice").exit_code == 0
    assert [one.stderr for one in said] == ["", "twice: takes the place of the adapter that had this name\n"]
    assert said[0].stdout == said[1].stdout != ""


def test_what_is_not_there_is_named(build: Path, tmp_path: Path) -> None:
    assert "no adapter is called 'absent'; it has none" in failure(
        "generate", build, "--prompt", "a", "--adapter", "absent"
    )
    assert "no adapter is called 'absent'" in failure("chat", build, "--adapter", "absent")
    assert "no adapter is called '../source'" in failure("adapter", "remove", build, "../source")
    assert "no such folder" in failure("adapter", "add", build, tmp_path / "missing")
