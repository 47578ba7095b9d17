"""Sounds in requests: official clients send them, each answer is its own sound's, and what is none is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import openai
import pytest
from media.noises import RATE, coded, tone, wav
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shardmill.media.image_rules import Placeholder
from shardmill.media.mel import MelRules
from shardmill.media.sound_rules import SoundRules, Transcription, read_sound_rules
from shardmill.serve.model import Model, Settings
from shardmill.serve.sounds import SoundReader, sound_reader
from shardmill.templates.render import Message

from .fake import NAME, VOCAB, Speaker, byte_tokenizer, fake_model
from .running import Running, running

pytest.importorskip("python_multipart")
MARK = "<|audio_pad|>"
RULES = SoundRules(
    MelRules(
        rate=16000, bins=16, window=400, fft=400, hop=160, scale="slaney", highest=8000, lead="reflect", power=2,
        log="decades", floor=1e-10, least=8000,
    ),
    window=300,
    chunk=100,
    rows=13,
    text=Placeholder(mark=MARK, row=MARK),
    transcription=Transcription("language {language}:", ":", {"en": "English", "de": "German"}),
)  # fmt: skip


class Hearer(Speaker):
    """Speaks by what it hears: the rows of the windows that it was shown, and no others."""

    beyond = True

    def __init__(self, **more: Any) -> None:
        super().__init__(slots=512, **more)
        self.shown: set[int] = set()
        self.towers = 0  # how often the tower ran

    def show(self, numbers: Sequence[int], columns: NDArray[np.float32], grid: tuple[int, int]) -> None:
        assert columns.shape == (16, grid[1]) and grid[0] == 1 and grid[1] <= 300
        assert len(numbers) == RULES.rows_of(grid[1])
        self.towers += 1
        self.shown |= {*numbers}

    def release(self, numbers: Sequence[int]) -> None:
        self.shown -= {*numbers}

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        assert all(token < VOCAB or token in self.shown for token in tokens), "a row that nobody has shown"
        return super().forward(tokens, slots, positions)


def heard_template(messages: Sequence[Message], *_: Any, **more: Any) -> str:
    """Texts as they are, and a mark for each sound; an answer that was begun goes on."""

    def content(parts: Any) -> str:
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        return "".join(MARK if part["type"] == "audio" else part["text"] for part in parts)

    said = "\n".join(f"{message['role']}: {content(message['content'])}" for message in messages)
    return said if messages[-1]["role"] == "assistant" else said + "\nassistant: "


def hearing_model(engine: Hearer | None = None) -> Model:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([MARK])
    reader = SoundReader(RULES, 3, "build", VOCAB, tokenizer, 512)
    return replace(fake_model(engine or Hearer()), tokenizer=tokenizer, template=heard_template, sounds=reader)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(hearing_model()) as up:
        yield up


def clip(seconds: float = 1.0) -> bytes:
    return wav(coded(tone(round(seconds * RATE)), 1, 16))


def sound(content: bytes | None = None, form: str = "wav") -> dict[str, Any]:
    data = base64.b64encode(clip() if content is None else content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def say(up: Running, *parts: Any, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 12, "temperature": 0}
    asked |= {"messages": [{"role": "user", "content": list(parts)}], **more}
    return up.client().chat.completions.create(**asked)


def answer_of(done: Any) -> str:
    return str(done.choices[0].message.content)


def alone(*parts: Any) -> str:
    with running(hearing_model(), Settings(port=0, prefix_cache=0)) as up:
        return answer_of(say(up, *parts))


def test_the_official_client_sends_a_sound(server: Running) -> None:
    """And is told how long it is, and how many tokens it takes: 13 of each second, of the last one what is there."""
    done = say(server, text("what is "), sound(), text("?"))
    assert len(answer_of(done)) > 0 and done.usage.prompt_tokens == len("user: what is ?\nassistant: ") + 13
    details = done.usage.prompt_tokens_details.model_dump()
    assert details["audio_tokens"] == 13 and details["sounds"] == [{"seconds": 1.0, "tokens": 13}]
    longer = say(server, sound(clip(3.37))).usage.prompt_tokens_details.model_dump()
    assert longer["sounds"] == [{"seconds": 3.37, "tokens": 39 + 5}]


def test_the_responses_api_takes_a_sound(server: Running) -> None:
    content: Any = [{"type": "input_text", "text": "what is "}, sound()]
    client = server.client()
    done = client.responses.create(
        model=NAME, input=[{"role": "user", "content": content}], max_output_tokens=12, temperature=0
    )
    assert done.output_text == answer_of(say(server, text("what is "), sound()))
    assert done.usage is not None and done.usage.input_tokens_details.model_dump()["audio_tokens"] == 13


def test_each_answer_is_its_sound_s_own(server: Running) -> None:
    """One after the other and in a crowd, with kept prefixes: what is said alone, in a server that knew no other."""
    asked = [(sound(clip(seconds)), text(said)) for seconds in (1.0, 1.02, 3.5) for said in ("a", "b")]
    wanted = [alone(*parts) for parts in asked]
    assert len({*wanted}) == len(wanted)
    for order in (range(6), reversed(range(6))):
        for place in order:
            assert answer_of(say(server, *asked[place])) == wanted[place]
    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(lambda place: answer_of(say(server, *asked[place])), [*range(6)] * 3))
    assert told == wanted * 3


def test_the_tower_runs_once_for_a_window() -> None:
    """In later turns, too, and for the same samples in another format."""
    engine = Hearer()
    with running(hearing_model(engine)) as up:
        for _ in range(3):
            say(up, sound(clip(3.5)), text("a"))
        say(up, sound(clip(3.5)), sound(clip(3.5)))
        assert engine.towers == 2
        soundfile = pytest.importorskip("soundfile")
        same = BytesIO()
        soundfile.write(same, np.frombuffer(clip(3.5)[44:], "<i2"), RATE, format="FLAC")
        say(up, sound(same.getvalue(), "flac"))
        assert engine.towers == 2


def test_a_placeholder_in_a_message_stays_text(server: Running) -> None:
    done = say(server, text(MARK), sound())
    assert done.usage.prompt_tokens == len(f"user: {MARK}\nassistant: ") + 13


LONG = wav(coded(tone(40 * 4000, 4000), 1, 8), rate=4000, bits=8)
REFUSED: dict[str, tuple[list[Any], str]] = {
    "an address": ([{**sound(), "input_audio": {"data": "https://example.com/a.wav"}}], "no address is fetched"),
    "a path": ([{**sound(), "input_audio": {"data": "/etc/passwd!"}}], "holds no base64"),
    "nothing": ([sound(b"")], "in no known format"),
    "text": ([sound(b"hello")], "in no known format"),
    "a header alone": ([sound(clip()[:44])], "cut off"),
    "too long for the context": ([sound(LONG)], "lasts 40 s, at most 39 s are allowed: cut it"),
    "four": ([sound()] * 4, "there are 4 sounds, at most 3 are allowed: send fewer"),
    "an image": ([{"type": "image_url", "image_url": {"url": "data:"}}], "this model takes no images"),
    "another format": ([sound(form="aac")], "must be a text or a list of parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sound_is_refused(server: Running, name: str) -> None:
    parts, said = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        say(server, *parts)
    message = str(caught.value.body["message"])  # type: ignore[index]
    assert said in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_a_user_sends_sounds(server: Running, role: str) -> None:
    message = {"role": role, "content": [sound()], "tool_call_id": "x"}
    with pytest.raises(openai.BadRequestError, match=f"a message of role {role} can't have audio: only a user's can"):
        say(server, messages=[{"role": "user", "content": "a"}, message])


def test_other_requests_take_no_sounds(server: Running) -> None:
    messages = [{"role": "user", "content": [sound()]}]
    for path, more in (("/tokenize", {}), ("/v1/decide", {"labels": ["a", "b"]})):
        status, told = server.post({"model": NAME, "messages": messages, **more}, path)
        assert status == 400 and "audio is for /v1/chat/completions and /v1/responses" in told["error"]["message"]
    status, told = server.post({"model": NAME, "messages": messages, "prompt_logprobs": 1}, "/v1/chat/completions")
    assert status == 400 and "prompt_logprobs can't be had of a prompt with audio" in told["error"]["message"]


def test_a_model_without_a_tower_takes_none() -> None:
    said = "this model takes no audio: send text alone"
    with running(fake_model()) as up:
        status, told = up.post({"model": NAME, "input": [{"role": "user", "content": [sound()]}]}, "/v1/responses")
        assert status == 400 and told["error"]["message"] == f"input.0.content: {said}"
        with pytest.raises(openai.BadRequestError, match=f"messages.0.content: {said}"):
            say(up, sound())
        with pytest.raises(openai.BadRequestError, match=said):
            transcribed(up)


def test_a_sound_needs_a_context_that_stays() -> None:
    slides, said = Settings(port=0, context_policy="slide"), "a context that slides can't hold audio"
    with running(hearing_model(), slides) as up, pytest.raises(openai.BadRequestError, match=said):
        say(up, sound())


# Transcriptions.


def transcribed(up: Running, content: bytes | None = None, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": NAME, "file": ("a.wav", clip() if content is None else content), **more}
    return up.client().audio.transcriptions.create(**asked)


def test_the_official_client_gets_a_transcript(server: Running) -> None:
    done = transcribed(server)
    told = server.client().chat.completions.create(
        model=NAME,
        temperature=0,
        messages=[{"role": "user", "content": [sound()]}],  # type: ignore[misc,list-item]
    )
    assert done.text == RULES.transcription.text(answer_of(told))  # type: ignore[union-attr]
    counted = done.usage.model_dump()
    assert counted["input_token_details"] == {"audio_tokens": 13, "text_tokens": len("user: \nassistant: ")}
    assert counted["type"] == "tokens" and counted["input_tokens"] == 13 + len("user: \nassistant: ")
    assert transcribed(server, response_format="text") == done.text + "\n"


def test_a_language_begins_the_answer_and_a_prompt_stands_before_the_sound(server: Running) -> None:
    plain, german, named = (transcribed(server, **more) for more in ({}, {"language": "de"}, {"language": "German"}))
    assert german == named and german.text != plain.text
    assert german.usage.input_tokens == 13 + len("user: \nassistant: language German:")
    hinted = transcribed(server, prompt="names: Ann")
    assert hinted.usage.input_tokens == plain.usage.input_tokens + len("system: names: Ann\n")


def test_the_text_comes_after_the_mark() -> None:
    rules = Transcription("language {language}<asr_text>", "<asr_text>", {})
    assert rules.text("language English<asr_text> So. ") == "So." and rules.text(" So.") == "So."
    assert rules.text("language None<asr_text>") == ""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "subtitles": ({"response_format": "srt"}, "response_format 'srt': only json and text are written here"),
    "more words": ({"response_format": "verbose_json"}, "'verbose_json': only json and text are written here"),
    "word times": ({"timestamp_granularities": ["word"]}, "'timestamp_granularities[]' is not supported"),
    "a stream": ({"stream": True}, "'stream' is not supported: leave it out"),
    "a language": ({"language": "xx"}, "language 'xx': the model knows en, de"),
    "no sound": ({"file": ("a.wav", b"hello")}, "in no known format"),
    "an empty file": ({"file": ("a.wav", b"")}, "file: send a sound as a file"),
    "a temperature": ({"temperature": "hot"}, "temperature"),
    "another model": ({"model": "whisper-1"}, "whisper-1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_form_that_can_t_be_honoured_is_refused_by_name(server: Running, name: str) -> None:
    more, said = WRONG[name]
    with pytest.raises(openai.APIStatusError) as caught:
        transcribed(server, **more)
    message = str(caught.value.body["message"])  # type: ignore[index]
    assert caught.value.status_code in (400, 404) and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"{}", "application/json", "must be a form with a file"),
        (b"no form", "multipart/form-data; boundary=x", "form"),
        (b"", "multipart/form-data", "form can't be read"),
    ],
)
def test_a_body_that_is_no_form_is_one_line(server: Running, body: bytes, kind: str, said: str) -> None:
    status, _, told = server.request("POST", "/v1/audio/transcriptions", body, {"Content-Type": kind})
    assert status == 400 and said in told.decode()


# The rules of a build.


def test_the_rules_of_a_build_are_read_back() -> None:
    assert read_sound_rules(RULES.written()) == RULES
    manifest = {"tower": {}, "audio": {**RULES.written(), "most": 2}, "vocab": VOCAB, "context": 64}
    reader = sound_reader(manifest, byte_tokenizer())
    assert reader is not None and (reader.most, reader.slots, reader.rules) == (2, 64, RULES)
    assert sound_reader({}, byte_tokenizer()) is None
