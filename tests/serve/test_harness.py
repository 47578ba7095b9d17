"""lm-evaluation-harness finds in a served build what it finds by transformers, on its three kinds of tasks.

It runs where the harness is installed (`pip install lm-eval[api]`), as `.ci/run nightly` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import limits
import program_forms
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.machine import is_portable

from .fake import NAME, fake_model
from .running import running

pytest.importorskip("lm_eval")
WINDOW = 40  # tokens of the harness: a longer text is cut into windows
TASKS = {
    "says": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "chooses": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "reads": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


@dataclass(frozen=True)
class Found:
    """What the harness found: each task's figures, and the answers to each of its documents."""

    figures: Mapping[str, Mapping[str, float]]
    answers: Mapping[str, list[Any]]


def harness(folder: Path, tasks: Path, kind: str, *, batch: int = 1, **arguments: Any) -> Found:
    """Runs the harness as its command line does; nothing is looked for in the internet."""
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", given, "--device", "cpu"]
    command += ["--tasks", *TASKS, "--include_path", str(tasks), "--output_path", str(folder), "--log_samples"]
    command += ["--batch_size", str(batch)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = folder.rglob("results_*.json")
    answers = {}
    for name in TASKS:
        (file,) = folder.rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
        answers[name] = [[one[0] for one in row["resps"]] for row in rows]
    return Found(json.loads(results.read_text())["results"], answers)


def likelihoods(found: Found, task: str) -> list[float]:
    """All log-likelihoods of a task, in the order of its documents."""
    return [float(one[0] if isinstance(one, list) else one) for answers in found.answers[task] for one in answers]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, rounded to fp16, with what transformers must know to load its tokenizer."""
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("rounded") / "checkpoint")
    for file in folder.glob("*.safetensors"):
        save_file({name: weight.half() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def tasks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks, as a user writes them; some documents are right by what the model itself says."""
    folder, tokenizer = tmp_path_factory.mktemp("tasks"), read_tokenizer(checkpoint / "tokenizer.json")
    model, text = tiny.transformers_model(checkpoint), tiny.sample_text()
    documents = []
    for i in range(8):
        shown = text[500 + 397 * i :][:30]
        fed = torch.tensor([tokenizer.encode(shown).ids])
        said = model.generate(fed, max_new_tokens=12, do_sample=False)[0, fed.shape[1] :].tolist()
        line, _, _ = tokenizer.decode(said).partition("\n")
        choices = [text[500 + 397 * i + 30 :][:9], f" {i}", "return None", text[9 + i :][:5]]
        documents.append({"text": shown, "said": line if i % 2 else "x", "choices": choices, "right": i % 2})
    windows = [{"text": text[700 + 911 * i :][: 60 + 100 * i]} for i in range(4)]  # the last ones take several windows
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        rows = windows if name == "reads" else documents
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))  # JSON is YAML
    return folder


def served(checkpoint: Path, folder: Path, tasks: Path, form: str, **more: Any) -> Found:
    """What the harness finds in a build of the checkpoint in a form, served in fp32."""
    source = tiny.fetched(checkpoint, folder / "source")
    engine = program_forms.load(tiny.converted(source, folder, quantization=form))
    tokenizer = read_tokenizer(source / "tokenizer.json")
    with running(replace(fake_model(), engine=engine, tokenizer=tokenizer, eos=(0,))) as server:
        address = f"http://127.0.0.1:{server.port}/v1/completions"
        # The harness takes two tokens off, one that is generated and one before the first.
        return harness(
            folder / "found", tasks, "local-completions", model=NAME, base_url=address, tokenizer=checkpoint,
            max_length=WINDOW + 2, **more,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_the_harness_finds_in_a_served_build_what_it_finds_in_transformers(
    checkpoint: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same figures, and log-likelihoods to rounding; four requests of two prompts at once get the same bits."""
    arguments = {"pretrained": checkpoint, "dtype": "float32", "max_length": WINDOW}
    expected = harness(tmp_path / "hf", tasks, "hf", **arguments)
    found = served(checkpoint, tmp_path / "fp16", tasks, "fp16")
    assert found.answers["says"] == expected.answers["says"]
    tokenizer = read_tokenizer(checkpoint / "tokenizer.json")
    for task in ("chooses", "reads"):
        documents = map(json.loads, (tasks / f"{task}.jsonl").read_text().splitlines())
        texts = [text for one in documents for text in one.get("choices", [one["text"]])]
        for text, mine, theirs in zip(texts, likelihoods(found, task), likelihoods(expected, task), strict=True):
            tokens = len(tokenizer.encode(text).ids) + 1
            limit = limits.logprobs(limits.model(tiny.LAYERS, tiny.FFN), 2, tiny.VOCAB, tokens)
            limits.numbers_agree(f"{task}: {text!r}", mine, theirs, limit, size=1)
    assert found.figures["chooses"]["acc,none"] == expected.figures["chooses"]["acc,none"]
    assert 0 < found.figures["says"]["exact_match,none"] < 1
    assert found.figures["says"]["exact_match,none"] == expected.figures["says"]["exact_match,none"]
    crowd = served(checkpoint, tmp_path / "crowd", tasks, "fp16", num_concurrent=4, batch=2)
    assert crowd.answers == found.answers
    rounded = served(checkpoint, tmp_path / "int8", tasks, "int8")
    with capsys.disabled():
        for task in ("chooses", "reads"):
            pairs = zip(likelihoods(rounded, task), likelihoods(expected, task), strict=True)
            most = max(abs(mine - theirs) for mine, theirs in pairs)
            print(f"\nINT8, {task}: log-likelihoods differ by at most {most:.3g} nats; {rounded.figures[task]}")
