"""The reference step writes what transformers says, and says what it can't do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from shardmill import canonical, config
from shardmill.errors import ConfigError, ShardmillError
from shardmill.steps import reference

POSITIONS = {"positions": 16, "perplexity_positions": 40}


@pytest.fixture
def build(built: tiny.Build, tmp_path: Path) -> Path:
    """A folder in which the steps before it have run."""
    import shutil

    shutil.copytree(built.source, tmp_path / "source")
    canonical.write_json(tmp_path / "plan.json", dict(built.plan))
    (tmp_path / "text.txt").write_text(tiny.sample_text(), encoding="utf-8")
    return tmp_path


def run(build: Path, **parity: Any) -> dict[str, torch.Tensor]:
    reference.run(
        build / "plan.json",
        build / "source.receipt.json",
        build / "text.txt",
        build / "reference.safetensors",
        build / "reference.receipt.json",
        str(build / ".store"),
        {**POSITIONS, **parity},
    )
    return load_file(build / "reference.safetensors")


def test_it_holds_tokens_edges_and_logits(build: Path) -> None:
    known = run(build)
    shapes = {name: tuple(tensor.shape) for name, tensor in known.items()}
    assert shapes == {"tokens": (40,), "hidden": (tiny.LAYERS + 1, 16, 96), "logits": (40, 256)}
    with torch.no_grad():
        expected = tiny.transformers_model(build / "source")(known["tokens"][None]).logits[0]
    torch.testing.assert_close(known["logits"], expected, rtol=1e-5, atol=1e-5)


def test_no_more_tokens_than_the_context_holds(build: Path) -> None:
    assert len(run(build, perplexity_positions=1000)["tokens"]) == tiny.CONTEXT


def test_a_text_that_is_too_short_is_named(build: Path) -> None:
    (build / "text.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"text\.txt: 1 tokens, parity\.positions asks for 16"):
        run(build)


def test_more_positions_than_the_context_are_not_blamed_on_the_text() -> None:
    """Said before any work, and of the right key."""
    content = tiny.settings("checkpoint", parity={"positions": tiny.CONTEXT + 1})
    with pytest.raises(ConfigError, match=rf"parity\.positions.* context of {tiny.CONTEXT}"):
        config.parse(content)


def test_a_checkpoint_without_a_tokenizer_is_one_clear_error(build: Path) -> None:
    (build / "source" / "tokenizer.json").unlink()
    with pytest.raises(ShardmillError, match=r"tokenizer\.json"):
        run(build)
