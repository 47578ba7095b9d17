"""A job that needs more memory than there may be ends a run before any begins; of a batch, its model is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import yaml
from snakemake.iocontainers import Wildcards

from shardmill import config
from shardmill.pipeline import resources, scheduling, snakefile
from shardmill.pipeline.batch import Batch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, with configs of two models, one of which has a vocabulary with a large table of logits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resources, "torch_mb", lambda: 220)
    Path("text.txt").write_text("a text")
    texts = {"parity": {"text": "text.txt"}, "benchmark": {"text": "text.txt", "tasks": []}}
    for name, vocab in (("small", 256), ("large", 400_000)):
        hf = tiny.hf_config()
        hf.vocab_size = vocab
        hf.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").touch()
        Path(f"{name}.yaml").write_text(yaml.safe_dump(tiny.settings(name, model=name, **texts)))


def run(limit: int | None, **theirs: dict[str, int]) -> SimpleNamespace:
    """Snakemake's workflow object, as far as it knows of memory."""
    return SimpleNamespace(
        configfiles=[],
        global_resources={"mem_mb": SimpleNamespace(value=limit), "_nodes": SimpleNamespace(value=None)},
        is_main_process=True,
        dryrun=False,
        resource_settings=SimpleNamespace(overwrite_resources=theirs),
    )


def batch(workflow: SimpleNamespace) -> Batch:
    return snakefile.checked({"batch": ["small.yaml", "large.yaml"]}, workflow)


def test_of_a_batch_a_model_that_does_not_fit_is_left_out_by_its_largest_job() -> None:
    found = batch(run(1400))
    assert list(found.models) == ["small"]
    line = found.refused["large.yaml"]
    assert line.startswith("large.yaml: parity_stack: needs ") and "this build may use 1400" in line
    needed = int(line.rsplit("=", 1)[1])
    assert list(batch(run(needed)).models) == ["small", "large"]
    assert list(batch(run(needed - 1)).models) == ["small"]


def test_memory_that_the_user_sets_is_taken_at_its_word() -> None:
    assert list(batch(run(1400, parity_stack={"mem_mb": 1000}, reference={"mem_mb": 1000})).models) == [
        "small",
        "large",
    ]


def test_a_job_of_a_batch_that_turns_out_too_large_gets_all_there_is() -> None:
    """Its checkpoint told so, after other models were begun."""
    found = batch(run(1400))
    for listed in (True, False):
        mem_mb = scheduling.mem_mb(Batch(found.models, listed=listed), run(1000))("parity_stack")
        assert callable(mem_mb)
        job: tuple[Any, ...] = Wildcards(fromdict={"model": "small"}), ["build/small/plan.json"]
        if listed:
            assert mem_mb(*job) == 1000
        else:
            with pytest.raises(scheduling.TooLarge):
                mem_mb(*job)


def test_what_is_not_known_before_the_checkpoint_is_there_refuses_nothing() -> None:
    """A config that names all of its programs is not held against a model on the hub before it is downloaded."""
    source = {"source": {"repo": "a/b", "revision": "0" * 40}}
    assert scheduling.too_large(config.parse(tiny.settings("") | source), run(750)) is None
