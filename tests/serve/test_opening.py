"""A system prompt that every start of the server has at hand, from the file of an earlier one or computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from bench.folder import build_folder
from transformers import PreTrainedTokenizerFast

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.decode import DecodeError, Session
from shardmill.errors import ShardmillError
from shardmill.runtime.process import EngineProcess
from shardmill.serve.engine_worker import Worker
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Model
from shardmill.serve.opening import MOST_FILES, opening_of

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


class Counting(EngineProcess):
    """Counts the tokens that are run after the passes that measure widths."""

    fed = 0

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        self.fed += len(tokens)
        super().write(tokens, slots, positions)


def test_a_start_reads_what_an_earlier_one_wrote(
    built: tiny.Build, fp32: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a pass, and with the same answer; a damaged file is one line, and made anew.

    A build from the hub may be called like a path.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "build").mkdir()
    engine = Counting(build_folder(built, tmp_path / "build"), "fp32")
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
    assert fed > 0 and reused == 40 and row == pytest.approx(expected, abs=1e-4) and not Path(model.name).exists()
    (folder,) = (tmp_path / "shardmill" / "prefixes").iterdir()
    (file,) = folder.iterdir()
    written = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        again = start()
        assert again[:2] == (0, 32) and not caplog.records
        file.write_bytes(written[:-5] + b"!" + written[-4:])
        assert start()[0] == fed
        (record,) = caplog.records
        assert f"{file}: damaged" in record.getMessage() and "\n" not in record.getMessage()
        assert file.read_bytes() == written and start()[0] == 0
        caplog.clear()
        assert start(replace(model, fingerprint="another"))[0] == fed
        for count in range(MOST_FILES):
            start(opening=opening[: 32 + count])
        assert len(list(folder.iterdir())) == MOST_FILES and not caplog.records
        file.unlink(missing_ok=True)
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
        assert start()[0] == fed
        assert "the next start computes the system prompt again" in caplog.text
    with pytest.raises(DecodeError, match="the context"):
        start(opening=[1] * (engine.slots + 1))
    assert Session(engine).prefill(opening).reused == 0
