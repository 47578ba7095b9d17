"""`shardmill draft train`: a text or prompts, what is kept for the next run, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from shardmill_lab.draft import train, windows

from shardmill.commands import draft
from shardmill.errors import ShardmillError
from shardmill.pipeline.cache.gc import collect

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(windows, "WINDOW", 32)
    monkeypatch.setattr(train, "THREADS", 1)
    monkeypatch.setattr(draft, "PROMPT", 8)
    folder = tmp_path / "build/tiny"
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=6), folder / "source")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "plan.json").write_text(json.dumps(tiny.split(source, topology=[[0, 6]])[1]))
    return folder


def trained(build: Path, text: Path, steps: int = 2) -> Path:
    out, threads = build.parents[1] / "head", torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        draft.train(build, text, out, steps)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    return out


def texts_of(build: Path) -> list[Path]:
    return sorted((build.parent / ".store/training").rglob("states_*.safetensors"))


def test_a_text_is_learnt_as_it_is(build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model computes it once for all numbers of steps, and nothing is trained twice; gc clears the rest."""
    text = tmp_path / "text.txt"
    text.write_text(tiny.sample_text()[:1500])
    head = trained(build, text)
    (file,) = texts_of(build)
    windows = load_file(file)
    assert windows["own"].all() and windows["tokens"].shape[1] == 32
    report = json.loads((head / "training.json").read_text())
    assert report["text_tokens"] == windows["tokens"].numel() and "tokens per pass in" in capsys.readouterr().out
    stamp, bits = file.stat().st_mtime_ns, (head / "model.safetensors").read_bytes()
    trained(build, text, 3)
    assert (head / "model.safetensors").read_bytes() != bits and "step 3 of 3" in capsys.readouterr().err
    trained(build, text, 2)
    assert (head / "model.safetensors").read_bytes() == bits and "step" not in capsys.readouterr().err
    assert [file.stat().st_mtime_ns for file in texts_of(build)] == [stamp]
    collect(build.parent)
    assert not texts_of(build)


def test_prompts_are_answered_by_the_model(build: Path, tmp_path: Path) -> None:
    """In its chat template; prompts over half a window are left out."""
    from transformers import AutoTokenizer

    text = tmp_path / "prompts.jsonl"
    asked = [f"{word} {number}" for number in range(6) for word in ("def", "a line\u2028another", "class")]
    lines = (json.dumps({"prompt": one}, ensure_ascii=False) + "\n" for one in (*asked, "long " * 40))
    text.write_text("".join(lines), encoding="utf-8")
    trained(build, text)
    tokenizer = AutoTokenizer.from_pretrained(build / "source")
    expected = [tokenizer.encode(f"[{one}]", add_special_tokens=False) for one in asked[:-1]]
    windows = load_file(texts_of(build)[0])
    lengths = windows["own"].long().argmax(1).tolist()
    found = [tokens[:length] for tokens, length in zip(windows["tokens"].tolist(), lengths, strict=True)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("text.txt", "a few words", "gives 0 texts of up to 32 tokens; give at least 10"),
        ("prompts.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', r'line 2: must be {"prompt": "..."}'),
        ("prompts.jsonl", '{"prompt": ["a"]}\n', r'line 1: must be {"prompt": "..."}'),
        ("prompts.jsonl", "[" * 100_000, r'line 1: must be {"prompt": "..."}'),
        ("prompts.jsonl", '{"prompt": "a"}\n', "gives 1 texts"),
    ],
)
def test_what_is_too_short_or_no_prompt_is_refused(
    build: Path, tmp_path: Path, name: str, content: str, reason: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ShardmillError) as caught:
        trained(build, tmp_path / name)
    assert reason in str(caught.value)


def test_a_short_text_is_refused_before_torch_is_imported(build: Path, tmp_path: Path) -> None:
    """Which takes seconds, and half a minute where the disk is cold."""
    (tmp_path / "text.txt").write_text("a few words")
    code = f"""
import sys
from pathlib import Path
from shardmill.commands import draft
from shardmill.errors import ShardmillError
try:
    draft.train(Path({str(build)!r}), Path({str(tmp_path / "text.txt")!r}), None, 1)
except ShardmillError as error:
    print(error, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/text.txt: gives 0 texts of up to 256 tokens; give at least 10 []\n"


def test_a_model_of_few_layers_is_refused_before_it_writes_anything(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "LEAST_LAYERS", 7)
    (tmp_path / "text.txt").write_text(tiny.sample_text()[:1500])
    with pytest.raises(ShardmillError, match="the model has 6 layers; a head needs 7 or more"):
        trained(build, tmp_path / "text.txt")
    assert not texts_of(build)
