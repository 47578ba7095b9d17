"""An app writes the conversations of published chat templates as jinja does, and splits thoughts as the server does."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest
from processes import succeeded
from serve.published import DAY, PUBLISHED, conversations
from serve.test_chat_format import renderer
from serve.test_published_templates import TEXTS, whole_format

from shardmill.serve.thoughts import ThoughtReader, answer_deltas
from shardmill.serve.tool_reader import CallReader
from shardmill.serve.tools import find_format
from shardmill.templates.form import ChatFormat
from shardmill.templates.thoughts import CHANNEL, FORMATS

from .programs import demand_check

pytestmark = pytest.mark.slow
HARMONY = find_format(CHANNEL)
SPACES = [" ", "\n", "\r\n", "\u3000", "\x1c", "\x85"]
CHANNELS = [
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant"),
    "<|return|>",
]


def swift(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    files = [folder / "texts.json", folder / "result.json"]
    files[0].write_text(json.dumps(given))
    succeeded(subprocess.run([*demand_check(), "texts", *map(str, files)], capture_output=True, text=True, check=False))
    found: dict[str, Any] = json.loads(files[1].read_text())
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_conversations(name: str, tmp_path: Path) -> None:
    demand_check()
    text, form = whole_format(name)
    talks = list(conversations(name, TEXTS, told=form.system is not None))
    given = {
        "formats": {name: form.as_json() | {"stop": []}},
        "seconds": datetime.combine(DAY, time(12)).timestamp(),
        "answers": [],
        "talks": [
            {"format": name, "messages": [[message["role"], message["content"]] for message in talk]} for talk in talks
        ],
    }
    render, written = renderer(text), 0
    for talk, found in zip(talks, swift(given, tmp_path)["talks"], strict=True):
        if form.takes(talk):
            assert found == render(talk, True, DAY.strftime)
            written += 1
        else:
            assert "to which the model's chat template gives a meaning" in found["refused"]
    assert written >= 50


def python_pieces(form: ChatFormat, prompt: str, pieces: Sequence[str]) -> dict[str, str]:
    """Split an answer as the server does."""
    thoughts = ThoughtReader(form.thoughts, opened=form.thoughts.opened_by(prompt)) if form.thoughts else None
    calls = CallReader(HARMONY, {}) if form.channels and HARMONY else None
    said = {"thought": "", "content": ""}
    for piece, ended in [*((piece, False) for piece in pieces), ("", True)]:
        for delta in answer_deltas(thoughts, calls, piece, ended=ended):
            if delta.kind in said:
                said[delta.kind] += delta.text
    return said


def cut(drawn: random.Random, text: str) -> list[str]:
    places = sorted(drawn.randrange(len(text) + 1) for _ in range(drawn.randrange(8)))
    return [text[one:other] for one, other in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("place", range(len(FORMATS) + 1))
def test_thoughts(place: int, tmp_path: Path) -> None:
    """Answers of marks, of halves of marks, of white space and words, cut anywhere."""
    demand_check()
    thoughts = FORMATS[place] if place < len(FORMATS) else None
    begin, end = (thoughts.begin, thoughts.end) if thoughts else ("", "")
    around: dict[str, Any] = {"before": "", "after": ""}
    given = {"begin": "", "user": around, "assistant": around, "generate": "", "stop": []}
    given |= {"thoughts": {"begin": begin, "end": end}} if thoughts else {"channels": True}
    marks = [begin, end, begin[:3], end[:-1], end[1:]] if thoughts else [*CHANNELS, CHANNELS[0][:9], "<|", "|>"]
    drawn = random.Random(place)
    answers = []
    for _ in range(3000):
        text = "".join(
            drawn.choice([*marks, *marks, *SPACES, "Hm", "e\u0301", "🏳️\u200d🌈"]) for _ in range(drawn.randrange(12))
        )
        prompt = drawn.choice(["Hi", begin, f"{begin} \n", begin[:-2]])
        answers.append({"format": "one", "prompt": prompt, "pieces": cut(drawn, text)})
    everything = {"formats": {"one": given}, "seconds": 0, "talks": [], "answers": answers}
    none = ChatFormat("", "", None, None, None, "", thoughts=thoughts, channels=thoughts is None)  # type: ignore[arg-type]
    for answer, found in zip(answers, swift(everything, tmp_path)["answers"], strict=True):
        mine = {kind: "".join(text for one, text in found if one == kind) for kind in ("thought", "content")}
        assert mine == python_pieces(none, answer["prompt"], answer["pieces"]), answer
