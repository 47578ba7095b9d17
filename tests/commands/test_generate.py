"""`shardmill generate`: the text, what is said of it, and what the options change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_decoding.drafters import BY_ITSELF
from manifests import manifest
from media.noises import RATE, coded, tone, wav
from numpy.typing import NDArray
from PIL import Image
from reciter import CONTINUATION, PROMPT, Reciter, byte_tokenizer, failure, reciting, shardmill

from shardmill.commands import generate as commands_generate
from shardmill.runtime import process


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a built model; its engine recites CONTINUATION after PROMPT."""
    return reciting(tmp_path / "demo", monkeypatch)


def test_generates_text_and_says_what_it_took(build: Path) -> None:
    """stdout holds the text and nothing else, the figures go to stderr."""
    result = shardmill("generate", build, "--prompt", PROMPT)
    assert result.exit_code == 0, result.output
    assert result.stdout == CONTINUATION + "\n"
    tokens = len(CONTINUATION.encode()) + 1  # and the end of the text
    assert f"[{tokens} tokens in " in result.stderr
    assert "drafted tokens accepted" in result.stderr


def test_streams_whole_characters(build: Path) -> None:
    """Text is written piece by piece, never half a character, and every piece as soon as its last byte is there."""
    from drafted_decoding import Options, Session, generate

    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode(PROMPT).ids
    written: list[str] = []

    class Out:
        write = staticmethod(written.append)
        flush = staticmethod(lambda: None)

    session = Session(process.load_engine(build, "fp32"))
    options = Options(detokenize=tokenizer.decode)
    result = commands_generate.consume(generate(session, prompt, max_new_tokens=100, eos=[256], options=options), Out())
    assert written == list(CONTINUATION)
    assert result.text == CONTINUATION


@pytest.mark.parametrize("option", ["--max-new-tokens", "--max-tokens"])
def test_an_unfinished_character_at_the_end_is_shown_as_such(build: Path, option: str) -> None:
    """Generation that stops inside a character loses nothing of what came before it."""
    result = shardmill("generate", build, "--prompt", PROMPT, option, 3)  # n, a, half of ï
    assert result.stdout == "na\ufffd\n"


def test_the_end_is_explained(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that stops short of what was asked for says why."""
    assert "the model ended the text" in shardmill("generate", build, "--prompt", PROMPT).stderr
    assert "--max-new-tokens reached" in shardmill("generate", build, "--prompt", PROMPT, "--max-new-tokens", 3).stderr
    monkeypatch.setattr(process, "load_engine", lambda *_: Reciter(byte_tokenizer().encode("a" * 400).ids))
    assert "the context is full" in shardmill("generate", build, "--prompt", "a" * 250).stderr


def test_json_has_what_the_design_promises(build: Path) -> None:
    """--json prints one object: the tokens, the text they are, and what they took."""
    result = shardmill("generate", build, "--prompt", PROMPT, "--drafter", "none", "--json")
    content = json.loads(result.stdout)
    assert result.stderr == ""
    assert content["tokens"] == [*byte_tokenizer().encode(CONTINUATION).ids, 256]
    assert content["text"] == CONTINUATION
    assert content["passes"] == len(content["tokens"]) - 1
    assert content["accepted"] == [0] * content["passes"]
    assert content["finish_reason"] == "eos"
    assert content["prefill_tok_s"] > 0
    assert content["decode_tok_s"] > 0
    assert content["engine"] in ("portable", "coreml")


def test_a_speed_that_was_not_measured_is_null(build: Path) -> None:
    """A single token comes out of the prefill: there is no decode speed, and none is made up."""
    content = json.loads(shardmill("generate", build, "--prompt", PROMPT, "--max-new-tokens", 1, "--json").stdout)
    assert content["decode_tok_s"] is None
    assert content["passes"] == 0


@pytest.mark.parametrize("drafter", BY_ITSELF)
def test_drafters_give_the_same_text(build: Path, drafter: str) -> None:
    """A drafter changes how fast text comes, never which."""
    assert shardmill("generate", build, "--prompt", PROMPT, "--drafter", drafter).stdout == CONTINUATION + "\n"


def test_a_draft_model_drafts(build: Path) -> None:
    """--draft-build names the draft model; here it is the model itself, so what it drafts is accepted."""
    arguments = ("generate", build, "--prompt", PROMPT, "--drafter", "draft_model", "--json")
    assert "name a second build with --draft-build" in failure(*arguments)
    content = json.loads(shardmill(*arguments, "--draft-build", build).stdout)
    assert content["text"] == CONTINUATION
    assert sum(content["accepted"]) > 0


def test_a_sliding_context_goes_on(build: Path) -> None:
    """Past what the context holds, and after a prompt that is longer; too small a context is refused unloaded."""
    slide = ("generate", build, "--context-policy", "slide", "--max-new-tokens", 300, "--json", "--prompt")
    for prompt in ("a" * 20, "a" * 400):
        recited = process.load_engine(build, "fp32")
        recited.text = [*byte_tokenizer().encode("a" * 900).ids]
        content = json.loads(shardmill(*slide, prompt).stdout)
        assert (len(content["tokens"]), content["finish_reason"]) == (300, "length")
    (build / "model.json").write_text(json.dumps(manifest(context=8)))
    assert "a context of 8 tokens is too small to slide" in failure(*slide, "a")


def test_lossy_acceptance_says_so(build: Path) -> None:
    """Everywhere that the text goes; without it nothing does."""
    arguments = ("generate", build, "--prompt", PROMPT)
    lossy = (*arguments, "--accept-top-p", 0.9)
    assert "[LOSSY: drafts within 0.9 of the probability accepted; " in shardmill(*lossy).stderr
    assert json.loads(shardmill(*lossy, "--json").stdout)["lossy"] is True
    assert "LOSSY" not in shardmill(*arguments).stderr
    assert json.loads(shardmill(*arguments, "--json").stdout)["lossy"] is False
    assert "accept_top_p is 0.0: it must be in (0, 1]" in failure(*arguments, "--accept-top-p", 0)


def test_temperature_draws_by_seed(build: Path) -> None:
    """At a temperature at which every byte is as likely, the seed decides; without one, nothing does."""

    def drawn(*options: object) -> list[int]:
        arguments = ("generate", build, "--prompt", PROMPT, "--max-new-tokens", 8, "--json", *options)
        tokens: list[int] = json.loads(shardmill(*arguments).stdout)["tokens"]
        return tokens

    hot = ("--temperature", 1e6)
    assert drawn(*hot, "--seed", 1) == drawn(*hot, "--seed", 1)
    assert drawn(*hot, "--seed", 1) != drawn(*hot, "--seed", 2)
    assert drawn("--seed", 1) == drawn("--seed", 2)


def test_prompts_from_files(build: Path, tmp_path: Path) -> None:
    """--prompt-file reads a file, and - is stdin."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert shardmill("generate", build, "--prompt-file", file).stdout == CONTINUATION + "\n"
    assert shardmill("generate", build, "--prompt-file", "-", stdin=PROMPT).stdout == CONTINUATION + "\n"


IMAGES = {"patch": 8, "merge": 2, "filter": "bicubic", "scale": 1 / 255, "mean": [0.5] * 3, "std": [0.5] * 3}
IMAGES |= {
    "size": {"rule": "area", "least": 256, "most": 4096},
    "text": {"mark": "<|end|>", "row": "<|end|>"},
    "most": 2,
}


class Seer(Reciter):
    """Knows the rows that it was shown, and what stands after them."""

    beyond = True

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(text)
        self.shown: set[int] = set()

    def show(self, numbers: Sequence[int], columns: NDArray[np.float32], grid: tuple[int, int]) -> None:
        assert columns.shape == (192, grid[0] * grid[1]) and len(numbers) == columns.shape[1] // 4
        self.shown |= {*numbers}

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        assert all(token < 257 or token in self.shown for token in tokens)
        return super().forward(tokens, slots, positions)


@pytest.fixture
def seeing(build: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its engine recites the text after 12 rows and PROMPT; there is no chat template."""
    (build / "model.json").write_text(
        json.dumps(manifest(tower={"patch": 8, "frames": 1, "merge": 2, "scale": 1.0}, images=IMAGES))
    )
    engine = Seer([0] * 12 + byte_tokenizer().encode(PROMPT + CONTINUATION).ids)
    monkeypatch.setattr(process, "load_engine", lambda *_: engine)
    return build


def picture(folder: Path, width: int = 64, height: int = 48) -> Path:
    Image.new("RGB", (width, height), "red").save(folder / "a.png")
    return folder / "a.png"


def test_an_image_stands_before_the_text(seeing: Path, tmp_path: Path) -> None:
    result = shardmill("generate", seeing, "--prompt", PROMPT, "--image", picture(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["text"] == CONTINUATION and told["prompt_tokens"] == 12 + len(PROMPT)
    assert told["images"] == [{"size": [64, 48], "resized": [64, 48], "tokens": 12}]
    plain = shardmill("generate", seeing, "--prompt", PROMPT, "--image", picture(tmp_path))
    assert plain.stdout == CONTINUATION + "\n"


def test_a_build_without_a_tower_takes_no_images(build: Path, tmp_path: Path) -> None:
    said = failure("generate", build, "--prompt", PROMPT, "--image", picture(tmp_path))
    assert said == f"{build}: takes no images: leave out --image, or build with `images` in the config"


def test_an_image_that_cannot_be_used_is_named(seeing: Path, tmp_path: Path) -> None:
    asked = ("generate", seeing, "--prompt", PROMPT)
    (tmp_path / "text.png").write_text("no picture")
    assert failure(*asked, "--image", tmp_path / "text.png").startswith(
        f"{tmp_path / 'text.png'}: the picture is in no"
    )
    assert failure(*asked, "--image", tmp_path / "none").startswith(f"{tmp_path / 'none'}: can't be read: No such file")
    assert failure(*asked, "--image", tmp_path).startswith(f"{tmp_path}: can't be read: Is a directory")
    three = [word for _ in range(3) for word in ("--image", picture(tmp_path))]
    assert failure(*asked, *three) == "--image: there are 3, at most 2 are allowed: give fewer"
    slides = failure(*asked, "--image", picture(tmp_path), "--context-policy", "slide")
    assert slides == "--image: a context that slides can't hold images; leave out --context-policy slide"


MEL = {"rate": 16000, "bins": 16, "window": 400, "fft": 400, "hop": 160, "scale": "slaney", "highest": 8000}
MEL |= {"lead": "reflect", "power": 2, "log": "decades", "floor": 1e-10}
SOUNDS = {"mel": MEL, "window": 300, "chunk": 100, "rows": 13, "text": {"mark": "<|end|>", "row": "<|end|>"}, "most": 2}


class Hearer(Seer):
    """Knows the windows that it was shown, and what stands after them."""

    def show(self, numbers: Sequence[int], columns: NDArray[np.float32], grid: tuple[int, int]) -> None:
        assert columns.shape == (16, grid[1]) and len(numbers) == 13 * grid[1] // 100
        self.shown |= {*numbers}


@pytest.fixture
def hearing(build: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its engine recites the text after 52 rows, of four seconds, and PROMPT; there is no chat template."""
    tower = {"chunk": 100, "rows": 13, "window": 300, "merge": 1, "scale": 1.0, "waves": {"channels": 4, "base": 1e4}}
    (build / "model.json").write_text(json.dumps(manifest(tower=tower, audio=SOUNDS)))
    engine = Hearer([0] * 52 + byte_tokenizer().encode(PROMPT + CONTINUATION).ids)
    monkeypatch.setattr(process, "load_engine", lambda *_: engine)
    return build


def spoken(folder: Path, seconds: int = 4) -> Path:
    (folder / "a.wav").write_bytes(wav(coded(tone(seconds * RATE), 1, 16)))
    return folder / "a.wav"


def test_a_sound_stands_before_the_text(hearing: Path, tmp_path: Path) -> None:
    result = shardmill("generate", hearing, "--prompt", PROMPT, "--audio", spoken(tmp_path), "--json")
    told = json.loads(result.stdout)
    assert told["text"] == CONTINUATION and told["prompt_tokens"] == 52 + len(PROMPT)
    assert told["sounds"] == [{"seconds": 4.0, "tokens": 52}]


def test_a_sound_that_cannot_be_used_is_named(hearing: Path, tmp_path: Path) -> None:
    asked = ("generate", hearing, "--prompt", PROMPT)
    (tmp_path / "text.wav").write_text("hello")
    assert failure(*asked, "--audio", tmp_path / "text.wav").startswith(f"{tmp_path / 'text.wav'}: the sound is in no")
    assert failure(*asked, "--audio", tmp_path / "none").startswith(f"{tmp_path / 'none'}: can't be read: No such file")
    three = [word for _ in range(3) for word in ("--audio", spoken(tmp_path))]
    assert failure(*asked, *three) == "--audio: there are 3, at most 2 are allowed: give fewer"
    slides = failure(*asked, "--audio", spoken(tmp_path), "--context-policy", "slide")
    assert slides == "--audio: a context that slides can't hold audio; leave out --context-policy slide"
    both = failure(*asked, "--audio", spoken(tmp_path), "--image", picture(tmp_path))
    assert both == "--audio: no build takes images as well; leave out one of the two"
    pictured = failure(*asked, "--image", picture(tmp_path))
    assert pictured == f"{hearing}: takes no images: leave out --image, or build with `images` in the config"


def test_a_build_without_a_tower_takes_no_sounds(build: Path, tmp_path: Path) -> None:
    said = failure("generate", build, "--prompt", PROMPT, "--audio", spoken(tmp_path))
    assert said == f"{build}: takes no audio: leave out --audio, or build with `audio` in the config"
