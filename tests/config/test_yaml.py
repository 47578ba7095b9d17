"""YAML that does not say what its author means is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.config.reading import read_yaml
from shardmill.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: a\nmodel: a\n", "model: given twice (line 2)"),
        ("model: a\ntokens:\n  max: 4\n  max: 8\n", "max: given twice (line 4)"),
        ("model: a\nlist:\n- {b: 1, b: 2}\n", "b: given twice (line 3)"),
        ('"model": a\nmodel: b\n', "model: given twice (line 2)"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["at the top", "within", "in a list", "quoted", "deep"],
)
def test_what_yaml_would_swallow_is_refused(tmp_path: Path, text: str, named: str) -> None:
    """YAML takes the last of a key given twice, so half of what somebody wrote would be without effect."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "a.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'a.yaml'}: ") and named in str(caught.value)


def test_equal_keys_of_different_mappings_are_welcome(tmp_path: Path) -> None:
    """As are anchors, even one within itself."""
    (tmp_path / "a.yaml").write_text("a: &x {text: 1}\nb: {text: 2}\nc: *x\nd: &y [*y]\n")
    assert read_yaml(tmp_path / "a.yaml")["c"] == {"text": 1}
