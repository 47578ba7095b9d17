"""A conversation in an app is the conversation that transformers' chat template and the Python runtime have."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from drafted_decoding import Sampling, Session
from drafted_decoding.generate import Options, TokenEvent, generate
from serve import templates
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shardmill.checkpoint.tokenizer import ODD_TEXTS
from shardmill.machine import is_portable, load_programs_as
from shardmill.runtime.engine import Engine
from shardmill.templates.chat_format import chat_format

from .programs import ROOT, demand_check, script
from .test_texts import BUILDS, finished

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="the pipe's programs run on the portable engine"),
    pytest.mark.slow,
]
WRITTEN = {
    "Gemma 2": templates.GEMMA_2,
    "Mistral": templates.MISTRAL,
    "Qwen 2.5": templates.HELPFUL,
    "Qwen 3": templates.THINKING,
    "Llama 3.2": templates.DATED,
}
Turn = Mapping[str, Any]


def described(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what model.json says of conversations; empty if nothing."""
    found: Mapping[str, Any] = manifest.get("conversation", manifest.get("chat", {}))
    return found


def swift_turns(build: Path, talks: Sequence[Mapping[str, Any]], folder: Path) -> list[list[Turn]]:
    """Return the turns of conversations with the Swift package, as an app has them."""
    files = [folder / "talks.json", folder / "turns.json"]
    files[0].write_text(json.dumps(talks))
    script("pipe_engine").serve([*demand_check(), "talk", str(build), *map(str, files)])
    found: list[list[Turn]] = json.loads(files[1].read_text())["talks"]
    return found


def python_turns(session: Session, build: Path, manifest: Mapping[str, Any], talk: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a conversation whose text transformers writes, and whose answers Python's runtime gives."""
    theirs = AutoTokenizer.from_pretrained(build / "source")
    tokenizer = Tokenizer.from_file(str(build / manifest["tokenizer"]["path"]))
    options = Options(Sampling(temperature=talk.get("temperature", 0.0), seed=talk.get("seed", 0)))
    said = [{"role": "system", "content": talk["instructions"]}] if "instructions" in talk else []
    ends = [*manifest["eos_token_ids"], *described(manifest)["stop"]]
    turns: list[Turn] = []
    for question in talk["questions"]:
        said.append({"role": "user", "content": question})
        text = theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        events = generate(session, prompt, max_new_tokens=talk["max_tokens"], eos=ends, options=options)
        tokens = [event.token for event in events if isinstance(event, TokenEvent)]
        shown = tokens[:-1] if tokens[-1] in ends else tokens
        answer = tokenizer.decode(shown, skip_special_tokens=False)
        said.append({"role": "assistant", "content": answer})
        turns.append({"answer": answer, "prompt_tokens": len(prompt), "tokens": len(tokens)})
    return turns


def assert_same_talks(build: Path, talks: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Compare answers and the lengths of prompts, and see that a turn runs only what is new."""
    manifest = json.loads((build / "model.json").read_text())
    with load_programs_as("fp32"):
        session = Session(Engine(manifest, build))
    found = swift_turns(build, talks, folder)
    for talk, mine in zip(talks, found, strict=True):
        wanted = python_turns(session, build, manifest, talk)
        assert [{key: turn[key] for key in wanted[0]} for turn in mine] == wanted
        assert all(turn["reused"] >= before["prompt_tokens"] for before, turn in zip(mine, mine[1:], strict=False))


@pytest.mark.parametrize("name", WRITTEN)
def test_templates_of_the_usual_shapes(name: str, tmp_path: Path) -> None:
    demand_check()
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint"), tmp_path / "source")
    (source / "chat_template.jinja").write_text(WRITTEN[name])
    build = finished(tiny.converted(source, tmp_path, context=512), tmp_path)
    manifest = json.loads((build / "model.json").read_text())
    formats, why = chat_format(source)
    assert not why
    manifest |= formats
    (build / "model.json").write_text(json.dumps(manifest))
    told = {"instructions": ODD_TEXTS[2]} if "system" in described(manifest) else {}
    questions = [text for text in ODD_TEXTS if text.isascii()]
    talks = [
        {"questions": questions[:3], "max_tokens": 12},
        {"questions": questions[3:6], "max_tokens": 12, "temperature": 0.9, "seed": 4, **told},
        {"questions": questions[6:9], "max_tokens": 12, **told},
    ]
    assert_same_talks(build, talks, tmp_path)


@pytest.mark.parametrize("build", os.environ.get(BUILDS, "").split(os.pathsep))
def test_templates_of_finished_builds(build: str, tmp_path: Path) -> None:
    """A checkpoint's own template."""
    demand_check()
    folder = ROOT / build
    if not build or not described(json.loads((folder / "model.json").read_text())):
        pytest.skip(f"no finished build with `chat` or `conversation` in its model.json is named by {BUILDS}")
    talks = [
        {"questions": ["Write a function that adds two numbers.", "Now in C.", "  Thanks!\n"], "max_tokens": 24},
        {"questions": ["Name a colour.", "日本語で言って"], "max_tokens": 16, "instructions": "Answer with one word."},
        {"questions": ["<|im_end|>\nHi", "Again"], "max_tokens": 12, "temperature": 0.7, "seed": 9},
    ]
    assert_same_talks(folder, talks, tmp_path)
