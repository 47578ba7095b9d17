"""Images in requests: official clients send them, each answer is its own picture's, and what is none is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from drafted_decoding import DecodeError, GenerationResult, Sampling, create_drafter
from media.hostile import black_png, photo, saved
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shardmill.commands import chat
from shardmill.errors import MediaError, ShardmillError
from shardmill.media.image_rules import Area, ImageRules, Placeholder
from shardmill.media.prompt import Row
from shardmill.serve import engine_worker
from shardmill.serve.conversation import Conversation, Talk
from shardmill.serve.model import Model, Settings
from shardmill.serve.pictures import Gallery, PictureReader, picture_bytes, picture_reader
from shardmill.templates.render import Message

from .fake import NAME, VOCAB, Speaker, byte_tokenizer, fake_model
from .running import Running, running

MARK = "<|image_pad|>"
RULES = ImageRules(
    patch=8,
    merge=2,
    filter="bicubic",
    scale=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    size=Area(16 * 16, 64 * 64),
    text=Placeholder(mark=MARK, row=MARK, before="[", after="]"),
)


class Seer(Speaker):
    """Speaks by what it sees: the rows that it was shown, and no others."""

    beyond = True

    def __init__(self, **more: Any) -> None:
        super().__init__(slots=512, **more)
        self.shown: dict[int, NDArray[np.float32]] = {}
        self.towers = 0  # how often the tower ran
        self.fails = False

    def show(self, numbers: Sequence[int], columns: NDArray[np.float32], grid: tuple[int, int]) -> None:
        assert columns.shape == (3 * 64, grid[0] * grid[1]) and len(numbers) == grid[0] * grid[1] // 4
        if self.fails:
            raise RuntimeError("the tower caught fire")
        self.towers += 1
        self.shown |= dict.fromkeys(numbers, columns)

    def release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.shown[number]

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        assert all(token < VOCAB or token in self.shown for token in tokens), "a row that nobody has shown"
        return super().forward(tokens, slots, positions)


def pictured_template(messages: Sequence[Message], *_: Any) -> str:
    """Texts as they are, and a mark for each image."""

    def content(parts: Any) -> str:
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        return "".join(MARK if part["type"] == "image" else part["text"] for part in parts)

    return "".join(f"{message['role']}: {content(message['content'])}\n" for message in messages) + "assistant: "


def seeing_model(engine: Seer | None = None) -> Model:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([MARK])
    reader = PictureReader(RULES, 3, "build", VOCAB, tokenizer)
    return replace(fake_model(engine or Seer()), tokenizer=tokenizer, template=pictured_template, pictures=reader)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(seeing_model()) as up:
        yield up


def uri(width: int = 48, height: int = 32, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64," + base64.b64encode(saved(photo(width, height), form)).decode()


def image(url: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri() if url is None else url, **more}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def say(up: Running, *parts: Any, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 12, "temperature": 0}
    asked |= {"messages": [{"role": "user", "content": list(parts)}], **more}
    return up.client().chat.completions.create(**asked)


def answer_of(done: Any) -> str:
    return str(done.choices[0].message.content)


def test_the_official_client_sends_an_image(server: Running) -> None:
    """And is told how many tokens it takes, and what of it the model sees."""
    done = say(server, text("what is "), image(detail="high"), text("?"))
    assert len(answer_of(done)) > 0 and done.usage.prompt_tokens == len("user: what is []?\nassistant: ") + 6
    details = done.usage.prompt_tokens_details.model_dump()
    assert details["image_tokens"] == 6
    assert details["images"] == [{"size": [48, 32], "resized": [48, 32], "tokens": 6}]
    large = say(server, image(uri(300, 200, "JPEG"))).usage.prompt_tokens_details.model_dump()
    assert large["images"] == [{"size": [300, 200], "resized": [64, 48], "tokens": 12}]
    assert "images" not in say(server, text("hello")).usage.prompt_tokens_details.model_dump()


def test_the_responses_api_takes_an_image(server: Running) -> None:
    parts: Any = [
        {"type": "input_text", "text": "what is "},
        {"type": "input_image", "image_url": uri(), "detail": "auto"},
    ]
    client = server.client()
    done = client.responses.create(
        model=NAME, input=[{"role": "user", "content": parts}], max_output_tokens=12, temperature=0
    )
    assert done.output_text == answer_of(say(server, text("what is "), image()))
    assert done.usage is not None and done.usage.input_tokens_details.model_dump()["image_tokens"] == 6


def test_a_stream_says_it_in_its_usage(server: Running) -> None:
    parts = say(server, image(), stream=True, stream_options={"include_usage": True})
    *_, last = parts
    assert last.usage.prompt_tokens_details.model_dump()["image_tokens"] == 6


def alone(*parts: Any, **more: Any) -> str:
    with running(seeing_model(), Settings(port=0, prefix_cache=0)) as up:
        return answer_of(say(up, *parts, **more))


def test_each_answer_is_its_pictures_own(server: Running) -> None:
    """One after the other and in a crowd, with kept prefixes: what is said alone, in a server that knew no other."""
    asked = [(image(uri(*size)), text(said)) for size in [(48, 32), (32, 48), (40, 40)] for said in ("a", "b")]
    wanted = [alone(*parts) for parts in asked]
    assert len(set(wanted)) == len(wanted)
    for order in (range(6), reversed(range(6))):
        for place in order:
            assert answer_of(say(server, *asked[place])) == wanted[place]
    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(lambda place: answer_of(say(server, *asked[place], max_tokens=12)), [*range(6)] * 3))
    assert told == wanted * 3


def test_two_pictures_have_their_order(server: Running) -> None:
    first, second = image(uri(48, 32)), image(uri(32, 48))
    assert answer_of(say(server, first, second)) == alone(first, second)
    assert answer_of(say(server, second, first)) == alone(second, first) != alone(first, second)


def test_the_tower_runs_once_for_a_picture() -> None:
    """In later turns, too, and in another format of the same pixels; a picture that comes twice is shown once."""
    engine = Seer()
    with running(seeing_model(engine)) as up:
        for _ in range(3):
            say(up, image(), text("a"))
        say(up, image(), image())
        assert engine.towers == 1
        say(up, image(uri(form="JPEG")), image())  # which has other pixels
        assert engine.towers == 2


@pytest.mark.parametrize("said", [MARK, f"{MARK}{MARK} {MARK}", "[" + MARK + "]"])
def test_a_placeholder_in_a_message_stays_text(server: Running, said: str) -> None:
    done = say(server, text(said), image())
    letters = len(f"user: {said}[]\nassistant: ")
    assert (
        done.usage.prompt_tokens == letters + 6 and done.usage.prompt_tokens_details.model_dump()["image_tokens"] == 6
    )
    assert answer_of(done) == alone(text(said), image())


NO_ADDRESS = "an image's url must be data:image/png;base64,...: no address is fetched, send the file itself"
REFUSED: dict[str, tuple[list[Any], str]] = {
    "an address": ([image("https://example.com/x.png")], NO_ADDRESS),
    "a file's address": ([image("file:///etc/passwd")], NO_ADDRESS),
    "a path": ([image("/etc/passwd")], NO_ADDRESS),
    "nothing": ([image("")], NO_ADDRESS),
    "data without base64": ([image("data:image/png,abc")], NO_ADDRESS),
    "no base64": ([image("data:image/png;base64,***")], "the image's url holds no base64"),
    "text": ([image("data:image/png;base64,aGVsbG8=")], "the picture is in no known format"),
    "a bomb": (
        [image("data:image/png;base64," + base64.b64encode(black_png(10_000, 10_000)).decode())],
        "at most 50000000 pixels",
    ),
    "too narrow": ([image(uri(201, 1))], "too narrow"),
    "four": ([image()] * 4, "there are 4 pictures, at most 3 are allowed: send fewer"),
    "audio": (
        [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
        "this model takes no audio: send text alone",
    ),
    "an address without url": ([{"type": "image_url", "image_url": {}}], "must be a text or a list of parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused(server: Running, name: str) -> None:
    parts, said = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        say(server, *parts)
    message = str(caught.value.body["message"])  # type: ignore[index]
    assert said in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_a_user_sends_images(server: Running, role: str) -> None:
    message = {"role": role, "content": [image()], "tool_call_id": "x"}
    with pytest.raises(openai.BadRequestError, match=f"a message of role {role} can't have images: only a user's can"):
        say(server, messages=[{"role": "user", "content": "a"}, message])


def test_other_requests_take_no_images(server: Running) -> None:
    messages = [{"role": "user", "content": [image()]}]
    for path, more in (("/tokenize", {}), ("/v1/decide", {"labels": ["a", "b"]})):
        status, told = server.post({"model": NAME, "messages": messages, **more}, path)
        assert status == 400 and "images are for /v1/chat/completions and /v1/responses" in told["error"]["message"]
    status, told = server.post({"model": NAME, "messages": messages, "prompt_logprobs": 1}, "/v1/chat/completions")
    assert status == 400 and "prompt_logprobs can't be had of a prompt with images" in told["error"]["message"]


def test_a_model_without_a_tower_takes_none() -> None:
    with running(fake_model()) as up:
        status, told = up.post(
            {"model": NAME, "messages": [{"role": "user", "content": [image()]}]}, "/v1/chat/completions"
        )
        assert (
            status == 400
            and told["error"]["message"] == "messages.0.content: this model takes no images: send text alone"
        )
        parts = [{"type": "input_image", "image_url": uri()}]
        status, told = up.post({"model": NAME, "input": [{"role": "user", "content": parts}]}, "/v1/responses")
        assert (
            status == 400 and told["error"]["message"] == "input.0.content: this model takes no images: send text alone"
        )


def test_a_sliding_context_takes_none() -> None:
    with running(seeing_model(), Settings(port=0, context_policy="slide")) as up:
        with pytest.raises(openai.BadRequestError, match="a context that slides can't hold images"):
            say(up, image())
        assert answer_of(say(up, text("a")))


def test_a_tower_that_fails_leaves_the_server_well() -> None:
    engine = Seer()
    with running(seeing_model(engine)) as up:
        engine.fails = True
        with pytest.raises(openai.InternalServerError):
            say(up, image())
        engine.fails = False
        assert answer_of(say(up, image())) == alone(image())


def refusing(*_: Any, **__: Any) -> Any:
    raise DecodeError("no such thing")


def test_an_answer_that_cannot_begin_gives_its_rows_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Seer()
    with running(seeing_model(engine)) as up:
        up.worker._gallery = Gallery(engine, idle=0)
        with monkeypatch.context() as patch:
            patch.setattr(engine_worker, "generate", refusing)
            with pytest.raises(openai.BadRequestError, match="no such thing"):
                say(up, image())
        assert engine.towers == 1 and not engine.shown
        say(up, image())
        say(up, text("another turn, after which the last one's rows are gone"))
        assert not engine.shown


def rows(seed: int, count: int = 4) -> Row:
    from shardmill.media.pixels import View

    return Row(View((4, 4), np.zeros((192, 16), np.uint8), RULES), tuple(VOCAB + 100 * seed + i for i in range(count)))


def test_rows_are_held_while_answers_use_them_and_the_last_ones_after() -> None:
    engine = Seer()
    gallery, one, two, three = Gallery(engine, idle=8), rows(1), rows(2), rows(3)
    gallery.take([one, two])
    gallery.take([one])
    gallery.give_back([one, two])
    assert {*engine.shown} == {*one.numbers, *two.numbers} and engine.towers == 2
    gallery.take([three])
    gallery.give_back([three, one])
    assert {*engine.shown} == {*one.numbers, *three.numbers}  # the last two of those that nobody uses
    gallery.take([two, one])
    assert engine.towers == 4
    assert {*engine.shown} == {*one.numbers, *two.numbers, *three.numbers}
    engine.fails = True
    with pytest.raises(RuntimeError):
        gallery.take([one, rows(4)])
    engine.fails = False
    gallery.give_back([two, one])
    gallery.take([rows(5)])
    gallery.give_back([rows(5)])
    assert {*engine.shown} == {*one.numbers, *rows(5).numbers}


@pytest.mark.parametrize(
    ("url", "content"),
    [
        ("data:image/png;base64,aGVsbG8=", b"hello"),
        ("DATA:IMAGE/PNG;BASE64,aGVsbG8=", b"hello"),
        ("data:;base64,aGVsbG8=", b"hello"),
        ("data:image/png;name=a.png;base64,aGVs\nbG8=", b"hello"),
    ],
)
def test_a_data_uri_is_read(url: str, content: bytes) -> None:
    assert picture_bytes(url) == content


def test_a_long_data_uri_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(MediaError, match="more than 20971520 bytes"):
        picture_bytes("data:image/png;base64," + "*" * (30 << 20))


def test_a_build_says_whether_it_takes_images() -> None:
    manifest = {"vocab": VOCAB, "tower": {}, "images": {**RULES.written(), "most": 5}}
    reader = picture_reader(json.loads(json.dumps(manifest)), byte_tokenizer())
    assert reader is not None and reader.rules == RULES and reader.most == 5
    assert picture_reader({"vocab": VOCAB}, byte_tokenizer()) is None


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two images, one of them in a folder with a space in its name."""
    (tmp_path / "my photos").mkdir()
    (tmp_path / "my photos/a.png").write_bytes(saved(photo(48, 32), "PNG"))
    (tmp_path / "b.png").write_bytes(saved(photo(32, 48), "PNG"))
    return tmp_path


def say_in_terminal(talk: Talk, conversation: Conversation, line: str) -> str:
    pieces = [*talk.turn(conversation, line, [])]
    assert isinstance(pieces[-1], GenerationResult)
    return "".join(piece.text for piece in pieces if not isinstance(piece, GenerationResult))


def test_images_in_the_terminal_are_answered_as_by_the_server(files: Path) -> None:
    """Each belongs to its message, also in later turns, whose earlier rows are there again; /new forgets them."""
    engine = Seer()
    model = seeing_model(engine)
    conversation, talk = Conversation(model), Talk(model, create_drafter("none"), Sampling(), 12)
    said = chat._see(model, conversation, f" '{files}/my photos/a.png' ", slides=False)
    assert said == "a.png: 48 x 32 pixels, 6 tokens of the next message"
    first = say_in_terminal(talk, conversation, "what is this?")
    assert first == alone(image(), text("what is this?"))
    chat._see(model, conversation, f"{files}/b.png", slides=False)
    second = say_in_terminal(talk, conversation, "and this?")
    third = say_in_terminal(talk, conversation, "again?")
    assert engine.towers == 2
    asked = [{"role": "user", "content": [image(), text("what is this?")]}, {"role": "assistant", "content": first}]
    asked += [{"role": "user", "content": [image(uri(32, 48)), text("and this?")]}]
    assert second == alone(messages=asked)
    asked += [{"role": "assistant", "content": second}, {"role": "user", "content": "again?"}]
    assert third == alone(messages=asked)
    conversation.clear()
    assert say_in_terminal(talk, conversation, "and this?") == alone(text("and this?")) != second


def test_a_turn_that_fails_keeps_its_image(files: Path) -> None:
    engine = Seer()
    model = seeing_model(engine)
    conversation, talk = Conversation(model), Talk(model, create_drafter("none"), Sampling(), 12)
    chat._see(model, conversation, f"{files}/b.png", slides=False)
    engine.fails = True
    with pytest.raises(RuntimeError):
        say_in_terminal(talk, conversation, "a")
    engine.fails = False
    assert say_in_terminal(talk, conversation, "a") == alone(image(uri(32, 48)), text("a"))


@pytest.mark.parametrize(
    ("named", "more", "refusal"),
    [
        ("", {}, "/image FILE: give one file"),
        ("a.png b.png", {}, "/image FILE: give one file"),
        ("'nothing.png", {}, "'nothing.png: can't be read: No such file or directory"),
        ("/", {}, "/: can't be read: Is a directory"),
        (__file__, {}, "test_images.py: the picture is in no known format"),
        ("a.png", {"slides": True}, "a context that slides can't hold images; start again with --context-policy stop"),
        ("a.png", {"template": None}, "images need a chat template; start again with --chat-template"),
        ("a.png", {"pictures": None}, "the model takes no images; build it with `images` in the config"),
    ],
)
def test_what_is_no_image_is_refused_in_the_terminal(named: str, more: dict[str, Any], refusal: str) -> None:
    slides = more.pop("slides", False)
    model = replace(seeing_model(), **more)
    conversation = Conversation(model)
    with pytest.raises(ShardmillError, match=refusal) as caught:
        chat._see(model, conversation, named, slides=slides)
    assert "\n" not in str(caught.value) and not conversation.pictures


def test_a_conversation_in_the_terminal_has_so_many_images(files: Path) -> None:
    model = seeing_model()
    conversation = Conversation(model)
    for _ in range(3):
        chat._see(model, conversation, f"{files}/b.png", slides=False)
    with pytest.raises(ShardmillError, match="a conversation may have 3 images; /new starts over"):
        chat._see(model, conversation, f"{files}/b.png", slides=False)
