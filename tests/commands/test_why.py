"""`shardmill why` on a command line: whose config it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmill import cli
from shardmill.checkpoint.fetch import hash_local, source_description
from shardmill.config import Source
from shardmill.pipeline import why
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.resolve import workflow_root

CONFIG = """
model: other
source: {repo: a/b, revision: 0123456789abcdef0123456789abcdef01234567}
context: 64
topology: [[0, 2]]
"""


def test_the_config_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text(CONFIG)
    said = CliRunner().invoke(cli.app, ["why", "build/demo", "--configfile", "other.yaml"])
    assert said.exit_code == 1
    assert said.stderr.startswith("shardmill: other.yaml: is the config of other, not of demo")
    assert said.stderr.count("\n") == 1
    assert not Path("build").exists()


def test_files_are_found_beside_the_workflow_as_in_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = str(workflow_root() / "configs/demo.yaml")
    said = CliRunner().invoke(cli.app, ["why", "build/demo", "--configfile", demo])
    assert (said.exit_code, "cached steps would work" in said.stdout) == (0, True), said.output


def test_a_tokenizer_that_got_tokens_is_as_it_was_fetched(tmp_path: Path) -> None:
    """Though source.json describes another tokenizer.json than the checkpoint's folder has."""
    folder, store = tmp_path / "checkpoint", Store(tmp_path / "store")
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name)
    files = source_description(folder, hash_local(folder, None))
    made, own = {"tokenizer.json": {"sha256": "a" * 64, "size": 3}}, {"tokenizer.json": files["tokenizer.json"]}
    fetched = {"repo": None, "commit": "local", "files": files | made, "completed": own}
    assert why._record(Source(path=str(folder)), fetched, store) == fetched
    (folder / "tokenizer.json").write_text("another")
    assert why._record(Source(path=str(folder)), fetched, store) != fetched
