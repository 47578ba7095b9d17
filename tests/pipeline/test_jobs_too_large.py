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
from shardmill.pipeline.batch import Batch, alike

from .workflows import rules


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
    workflow.rules = rules(Path("small.yaml")).values()
    return scheduling.that_fit(snakefile.checked({"batch": ["small.yaml", "large.yaml"]}, workflow), workflow)


def test_of_a_batch_a_model_that_does_not_fit_is_left_out_by_its_largest_job() -> None:
    found = batch(run(1400))
    assert list(found.models) == ["small"]
    line = found.refused["large.yaml"]
    assert line.startswith("large.yaml: benchmark: needs ") and "this build may use 1400" in line
    needed = int(line.rsplit("=", 1)[1])
    assert list(batch(run(needed)).models) == ["small", "large"]
    assert list(batch(run(needed - 1)).models) == ["small"]


def test_memory_that_the_user_sets_is_taken_at_its_word() -> None:
    told = {step: {"mem_mb": 1000} for step in ("split", "parity_stack", "reference", "benchmark")}
    assert list(batch(run(1400, **told)).models) == ["small", "large"]


def test_a_job_of_a_batch_that_turns_out_too_large_gets_all_there_is() -> None:
    """Its checkpoint told so, after other models were begun."""
    found = batch(run(1400))
    for listed in (True, False):
        mem_mb = scheduling.memory(Batch(found.models, listed=listed), run(500))
        job: tuple[Any, ...] = Wildcards(fromdict={"model": "small"}), ["build/small/plan.json"], 1, "parity_stack"
        if listed:
            assert mem_mb(*job) == 500
        else:
            with pytest.raises(scheduling.TooLarge):
                mem_mb(*job)


def test_what_is_not_known_before_the_checkpoint_is_there_refuses_nothing() -> None:
    """A config that names all of its programs is not held against a model on the hub before it is downloaded."""
    source = {"source": {"repo": "a/b", "revision": "0" * 40}}
    workflow = run(750)
    workflow.rules = rules(Path("small.yaml")).values()
    assert scheduling.too_large(config.parse(tiny.settings("") | source), workflow) is None


def test_a_list_of_which_no_model_fits_ends_the_run_with_one_line() -> None:
    with pytest.raises(SystemExit, match=r"shardmill: small\.yaml: [\w ]+: needs \d+ MB of memory and this build may"):
        batch(run(600))


def test_what_is_left_of_a_list_keeps_the_names_of_the_rules_that_were_read() -> None:
    """Snakemake's processes of jobs are told of them, and would count the models that are left anew."""
    content = yaml.safe_load(Path("small.yaml").read_text()) | {
        "topology": [[0, 4]]
    }  # so that it has a rule of its own
    Path("small.yaml").write_text(yaml.safe_dump(content))
    workflow = run(1400)
    workflow.rules = rules(Path("small.yaml")).values()
    whole = snakefile.checked({"batch": ["large.yaml", "small.yaml"]}, workflow)
    left = scheduling.that_fit(whole, workflow)
    assert [one.rule for one in alike(whole, "split")] == ["split", "split_1"]
    assert [(one.rule, one.models) for one in alike(left, "split")] == [("split_1", ("small",))]
