"""A system prompt that every start of the server has at hand, from the file of an earlier one or computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import tiny
from bench.folder import build_folder
from drafted_decoding import DecodeError, Options, Session
from patience import wait_until
from transformers import PreTrainedTokenizerFast

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import ShardmillError
from shardmill.runtime.process import Remote, start_engine
from shardmill.serve.engine_worker import Worker
from shardmill.serve.jobs import Job, Work
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model
from shardmill.serve.opening import MOST_FILES, opening_of
from shardmill.serve.stream import take_all

from . import templates
from .fake import byte_tokenizer, fake_model

PROMPT = "You are terse.\nAnswer in Latin."


@pytest.mark.parametrize("name", ["CHATML", "LLAMA", "GEMMA_3", "MISTRAL", "PHI_3", "QWEN_3_5"])
def test_an_opening_is_what_all_conversations_begin_with(name: str) -> None:
    """As transformers renders them, up to the question."""
    kind: Any = PreTrainedTokenizerFast
    theirs = kind(tokenizer_object=byte_tokenizer(), chat_template=getattr(templates, name))

    def render(messages: Any) -> str:
        return str(theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    opening = opening_of(replace(fake_model(), template=render), PROMPT)
    for question in ("Who are you?", "zzz"):
        asked = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
        text = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert text[: len(opening)] == opening
    assert PROMPT in byte_tokenizer().decode(opening)


def test_a_template_may_refuse_it_and_a_model_without_one_reads_it() -> None:
    def refusing(messages: Any) -> str:
        raise ValueError("no system role")

    with pytest.raises(ShardmillError, match="refuses the system prompt: no system role"):
        opening_of(replace(fake_model(), template=refusing), PROMPT)
    model = fake_model(chat=False)
    assert opening_of(model, PROMPT) == model.encode(PROMPT)


def rights(file: Path) -> list[int]:
    """Of a file and its folder."""
    return [path.stat().st_mode & 0o777 for path in (file, file.parent)]


class Counting(Remote):
    """Counts the tokens that are run after the passes that measure widths."""

    fed = 0

    fails = 0  # passes to come whose numbers are not finite

    def __init__(self, build: Path) -> None:
        process = start_engine(build, "fp32").process
        super().__init__(process, *process.model)

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        self.fed += len(tokens)
        self.process.call("write", tokens, slots, positions)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        logits = self.process.call("forward", tokens, slots, positions)
        self.fails -= 1
        return np.full_like(logits, np.nan) if self.fails >= 0 else logits


@pytest.mark.thorough(but=["-1-32"])
@pytest.mark.parametrize(("cache", "fails", "reused"), [("", 1, 32), ("/dev/null", 1, 40), ("/dev/null", 2, 0)])
def test_it_is_at_hand_after_a_request_that_failed(
    built: tiny.Build, fp32: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, fails: int, reused: int
) -> None:
    """From the file, or computed if there is no file. If that fails too, the server goes on without it."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache or str(tmp_path))
    (tmp_path / "build").mkdir()
    engine = Counting(build_folder(built, tmp_path / "build"))
    tokenizer = read_tokenizer(built.source / "tokenizer.json")
    model = replace(fake_model(chat=False), engine=engine, tokenizer=tokenizer, eos=())
    worker = Worker(model, Metrics(), queue=1, prefix_cache=1 << 30, opening=built.text[:40])
    worker.start()

    def answer(fails: int = 0) -> Any:
        async def ask() -> Any:
            job = Job(Work((*built.text[:40], 5, 6, 7), 3, "none", Options(), ()))
            worker.submit(job)
            return (await take_all(job))[-1]

        engine.fails = fails
        answered = asyncio.run(ask())
        wait_until(lambda: worker._running is None)
        return answered

    first = answer()
    assert answer(fails).status == 500
    again = answer()
    assert again.tokens == first.tokens and again.reused_tokens == reused
    worker.close(10)


def test_a_start_reads_what_an_earlier_one_wrote(
    built: tiny.Build, fp32: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a pass, and with the same answer; a damaged file is one line, and made anew.

    A build from the hub may be called like a path.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "build").mkdir()
    engine = Counting(build_folder(built, tmp_path / "build"))
    tokenizer = read_tokenizer(built.source / "tokenizer.json")
    model = replace(fake_model(chat=False), engine=engine, tokenizer=tokenizer, name=f"{tmp_path}/elsewhere")
    opening = list(built.text[:40])

    def start(model: Model = model, opening: Sequence[int] = opening, budget: int = 1 << 30) -> tuple[int, int, Any]:
        """Tokens run at the start, tokens of a prompt that were at hand, and the logits after it."""
        engine.fed = 0
        worker = Worker(model, Metrics(), queue=1, prefix_cache=budget, opening=opening)
        fed = engine.fed
        last = worker._session.prefill([*built.text[:40], 5, 6, 7])
        assert worker._prefixes is None or worker._prefixes.bytes <= budget
        return fed, last.reused, last.row

    *_, expected = start(opening=())
    assert not (tmp_path / "shardmill").exists()
    fed, reused, row = start()
    assert fed > 0 and reused == 40 and not Path(model.name).exists()
    limits.rows_agree("logits", row, expected, limits.model(tiny.LAYERS, tiny.FFN))
    (file,) = (tmp_path / "shardmill" / "prefixes").glob("*/*")
    written = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        again = start()
        assert again[:2] == (0, 32) and not caplog.records and rights(file) == [0o600, 0o700]
        file.write_bytes(written[:-5] + b"!" + written[-4:])
        assert start()[0] == fed
        (record,) = caplog.records
        assert f"{file}: damaged" in record.getMessage() and "\n" not in record.getMessage()
        assert file.read_bytes() == written and start()[0] == 0
        caplog.clear()
        assert start(replace(model, fingerprint="another"))[0] == fed
        for count in range(MOST_FILES):
            start(opening=opening[: 32 + count])
        assert len(list(file.parent.iterdir())) == MOST_FILES and not caplog.records
        file.unlink(missing_ok=True)
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
        assert start()[0] == fed
        assert "the next start computes the system prompt again" in caplog.text
    with pytest.raises(DecodeError, match="the context"):
        start(opening=[1] * (engine.slots + 1))
    assert Session(engine).prefill(opening).reused == 0
