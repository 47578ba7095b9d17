"""A model to serve without a built one: a scripted engine that speaks UTF-8, and one token per byte.

Its next character is a hash of all that a token may see, so that an answer mixed up with another one differs. It is
slowed down or held up on request.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from drafted_decoding.engine import PlainEngine
from numpy.typing import NDArray
from patience import PATIENCE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shardmill.serve.model import Model
from shardmill.serve.tools import FORMATS
from shardmill.templates.render import Message
from shardmill.templates.thoughts import find_thoughts

CHARACTERS = [c.encode() for c in "etaoin shrdlu.,ABé東🙂"]
VOCAB = 257
END = 256  # the token that ends a text
NAME = "fake"


@cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character outside ASCII is split; the last token ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@cache
def byte_tokens() -> tuple[int, ...]:
    """Byte -> its token."""
    found: dict[int, int] = {}
    for character in [*map(chr, range(0x800)), *(c.decode() for c in CHARACTERS)]:
        found |= dict(zip(character.encode(), byte_tokenizer().encode(character).ids, strict=True))
    return tuple(found.get(byte, -1) for byte in range(256))


@cache
def token_bytes() -> dict[int, int]:
    """Token -> its byte."""
    return {token: byte for byte, token in enumerate(byte_tokens())}


def speak(visible: tuple[tuple[int, int], ...]) -> int:
    """The next byte of a valid UTF-8 text: ends a character that was begun, else begins one by a hash."""
    tail = bytes(token_bytes().get(token, 0) for _, token in visible[-3:])
    for begun in range(min(3, len(tail)), 0, -1):
        for character in CHARACTERS:
            if len(character) > begun and character.startswith(tail[-begun:]):
                return byte_tokens()[character[begun]]
    return byte_tokens()[random.Random(repr(visible)).choice(CHARACTERS)[0]]


class Speaker(PlainEngine):
    """Speaks without end, `delay` seconds a pass, only while `free` is set. Refuses calls that break its contract."""

    widths, vocab, threads = (1, 4), VOCAB, None

    def __init__(self, *, slots: int = 256, delay: float = 0.0) -> None:
        self.slots, self.delay = slots, delay
        self.passes = 0
        self.free = threading.Event()
        self.free.set()
        self.reached = threading.Event()  # a pass has begun
        self.reset()

    def reset(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}  # slot -> position and token

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._held.pop(slot, None)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        self.reached.set()
        assert self.free.wait(PATIENCE), "a test forgot to free the engine"
        time.sleep(self.delay)
        assert len(tokens) == len(slots) == len(positions) and len(tokens) in self.widths
        assert all(0 <= slot < self.slots for slot in slots), "a slot past S"
        self.passes += 1
        self._held |= dict(zip(slots, zip(positions, tokens, strict=True), strict=True))
        return np.stack([self._row(position) for position in positions])  # [T, V]

    def _row(self, position: int) -> NDArray[np.float32]:
        visible = tuple(sorted(entry for entry in self._held.values() if entry[0] <= position))
        logits = np.random.default_rng(abs(hash(visible))).random(VOCAB, dtype=np.float32)
        logits[speak(visible)] += 2.0
        return logits

    def hold(self) -> None:
        """Stops before the next pass; wait for `reached` to know that it got there."""
        self.reached.clear()
        self.free.clear()


class Reciter(Speaker):
    """Knows one text by heart: after position p comes its token p + 1, however it is prompted."""

    def __init__(self, text: str) -> None:
        super().__init__(slots=512, delay=0.002)  # the same for every width, so that drafts pay
        self._text = [*byte_tokenizer().encode(text).ids, END]

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        time.sleep(self.delay)
        following = [self._text[min(p + 1, len(self._text) - 1)] for p in positions]
        return np.eye(VOCAB, dtype=np.float32)[following] * 20  # [T, V]


class Broken(Speaker):
    """Fails in a pass that begins with `~`, and from then on in every pass until it is reset."""

    def reset(self) -> None:
        super().reset()
        self.burnt = False

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        self.burnt |= tokens[0] == byte_tokens()[ord("~")]
        if self.burnt:
            raise RuntimeError("the engine caught fire")
        return super().forward(tokens, slots, positions)


class Answerer(Speaker):
    """Answers every conversation with the same text, and ends there. A prompt ends with the text `opening`."""

    def __init__(self, text: str, opening: str = "assistant: ") -> None:
        super().__init__(slots=2048)
        self._answer = [*byte_tokenizer().encode(text).ids, END]
        self._opening = opening.encode()

    def _row(self, position: int) -> NDArray[np.float32]:
        visible = sorted(entry for entry in self._held.values() if entry[0] <= position)
        _, _, said = bytes(token_bytes().get(token, 0) for _, token in visible).rpartition(self._opening)
        row: NDArray[np.float32] = np.eye(VOCAB, dtype=np.float32)[self._answer[min(len(said), len(self._answer) - 1)]]
        return row * 20


def template(messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
    """`role: text` lines after the tools; refuses a conversation that begins with an answer, as many templates do."""
    if messages[0]["role"] == "assistant":
        raise ValueError("the first message must be the user's")
    listed = [f"tools: {json.dumps(list(tools))}\n"] if tools else []
    said = [
        f"{m['role']}: {m['content']}"
        + "".join(f" calls {json.dumps(call)}" for call in m.get("tool_calls", ()))
        + "\n"
        for m in messages
    ]
    return "".join([*listed, *said]) + "assistant: "


def fake_model(
    engine: Speaker | None = None, *, chat: bool = True, tools: str | None = None, thoughts: str = ""
) -> Model:
    """The engine with the byte tokenizer; its template teaches the format `tools` of calls, and the mark `thoughts`."""
    return Model(
        name=NAME,
        engine=engine or Speaker(),
        engine_name="scripted",
        tokenizer=byte_tokenizer(),
        eos=(END,),
        template=template if chat else None,
        tools=next((form for form in FORMATS if form.name == tools), None),
        thoughts=find_thoughts(thoughts),
        fingerprint="fake-1",
    )
