"""Answers take turns: others wait for a slice of a long answer, which says what it would have said alone."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import adapters
import pytest
import tiny
from drafted_decoding import Session
from drafted_decoding.prefixes import BLOCK
from numpy.typing import NDArray
from patience import PATIENCE, wait_until
from shared import once

from shardmill.machine import is_portable
from shardmill.runtime.adding import add_adapter
from shardmill.serve.engine_worker import SET_ASIDE, SET_ASIDE_BYTES, SLICE
from shardmill.serve.model import Model, Settings, load_model

from .fake import Broken, Speaker, byte_tokenizer, fake_model
from .running import Running, ask, running

LONG = 60  # tokens of an answer of several slices


class Copier(Broken):
    """Can copy its slots, and notes whose text each pass is by the text's first letter."""

    size = 1  # bytes of a position's copy
    stops_at = ""  # the letter of a text before whose first pass it stops

    def __init__(self, **more: Any) -> None:
        self.copies: dict[int, dict[int, tuple[int, int]]] = {}
        self.turns = ""
        super().__init__(**more)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[Any]:
        if positions[0] == 0 and byte_tokenizer().decode([tokens[0]]) == self.stops_at:
            self.hold()
        found = super().forward(tokens, slots, positions)
        self.turns += byte_tokenizer().decode([self._held[0][1]])
        return found

    def copy_bytes(self) -> tuple[int, int]:
        return self.size, 0

    def copy_out(self, spans: Mapping[int, tuple[int, int]], rest: int | None = None) -> dict[int, int]:
        sizes = {key: self.size * (stop - start) for key, (start, stop) in spans.items()}
        self.copies |= {key: {slot: self._held[slot] for slot in range(*span)} for key, span in spans.items()}
        return sizes

    def copy_in(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._held |= self.copies[key]

    def drop_copies(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self.copies[key]


class Crowd:
    """Requests that wait while the engine stands still in the first pass of the answer `L`."""

    def __init__(self, server: Running, engine: Speaker, **more: Any) -> None:
        body = ask(**{"prompt": "Long", "max_tokens": LONG, "user": "L", **more})
        self.server, self.engine, self._pool = server, engine, ThreadPoolExecutor(40)
        engine.hold()
        self.answers = [self._pool.submit(server.post, body)]
        assert engine.reached.wait(PATIENCE)

    def add(self, prompt: str, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        """Another request, which waits."""
        waiting = self.server.metric("shardmill_queue_length")
        body = ask(prompt=prompt, **{"max_tokens": 8, "user": prompt, **more})
        self.answers.append(self._pool.submit(self.server.post, body, **(headers or {})))
        wait_until(lambda: self.server.metric("shardmill_queue_length") == waiting + 1)

    def texts(self) -> list[str]:
        """What each says in the end."""
        self.engine.free.set()
        found = [answer.result() for answer in self.answers]
        assert [status for status, _ in found] == [200] * len(found), found
        return [answer["choices"][0]["text"] for _, answer in found]


def alone(prompt: str, count: int) -> str:
    with running(fake_model(Speaker())) as server:
        text: str = server.post(ask(prompt=prompt, max_tokens=count))[1]["choices"][0]["text"]
        return text


def test_the_ninth_of_nine_waits_for_nine_slices() -> None:
    """One of the long answer and eight of the others, which need no second turn for their eight tokens."""
    engine = Copier()
    names = "abcdefghi"
    with running(fake_model(engine), Settings(port=0, prefix_cache=0, drafter="none")) as server:
        engine.turns = ""
        crowd = Crowd(server, engine)
        for name in names:
            crowd.add(name)
        texts = crowd.texts()
        assert server.metric("shardmill_turns_total") == 1
        assert server.metric("shardmill_unsliced_total") == server.metric("shardmill_set_aside_bytes") == 0
    assert engine.turns.startswith("L" * SLICE + "".join(name * SLICE for name in names) + "L")
    assert texts == [alone("Long", LONG), *(alone(name, 8) for name in names)]
    assert not engine.copies


def test_long_answers_take_turns_until_all_are_over() -> None:
    """The first one drafts nothing, so that the others, which need no more passes than it, end before it."""
    engine = Copier()
    with running(fake_model(engine), Settings(port=0, prefix_cache=0)) as server:
        engine.turns = ""
        crowd = Crowd(server, engine, shardmill={"drafter": "none"})
        for name in "ab":
            crowd.add(name, max_tokens=LONG, shardmill={"drafter": "learned"})
        texts = crowd.texts()
    assert texts == [alone("Long", LONG), alone("a", LONG), alone("b", LONG)]
    longest = max(map(len, engine.turns.replace("L", " ").split()))
    assert longest <= 2 * SLICE  # of a and b together
    assert len(engine.turns) <= sum(1 + LONG for _ in range(3)) and not engine.copies


@pytest.mark.thorough
def test_of_many_requests_of_a_client_further_ones_begin_as_others_end() -> None:
    """Otherwise those that wait set aside would stand still until the rest, which can't be set aside, is over."""
    engine = Copier()
    names = "abcdefghijklm"
    with running(fake_model(engine), Settings(port=0, prefix_cache=0, drafter="none")) as server:
        engine.turns = ""
        crowd = Crowd(server, engine)
        for name in names:
            crowd.add(name, user="L", max_tokens=3 * SLICE)
        texts = crowd.texts()
        assert server.metric("shardmill_unsliced_total") == 0
    assert texts == [alone("Long", LONG), *(alone(name, 3 * SLICE) for name in names)]
    firsts = [engine.turns.index(name) for name in names]
    assert firsts == sorted(firsts) and engine.turns.rindex("a") < engine.turns.index("m")


@pytest.mark.thorough(but=["no memory", "slid"])
@pytest.mark.parametrize("why", ["no copies", "no memory", "slid", "full", "trained"])
def test_an_answer_that_cannot_be_held_is_not_sliced_and_counted(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Speaker() if why == "no copies" else Copier(slots=64 if why == "slid" else 256)
    if isinstance(engine, Copier) and why == "no memory":
        engine.size = SET_ASIDE_BYTES
    if why == "full":
        monkeypatch.setattr("shardmill.serve.engine_worker.SET_ASIDE", -1)
    if why == "trained":  # a drafter that reads what a copy leaves out
        monkeypatch.setattr("shardmill.serve.engine_worker.TRAINED", {"ngram": ""})
    if why == "slid":
        monkeypatch.setattr("shardmill.serve.engine_worker.SLICE", 30)  # the prompt's 13 passes, and until it has slid
    policy: Any = "slide" if why == "slid" else "stop"
    more = {"prompt": "L" * 50} if why == "slid" else {}
    with running(fake_model(engine), Settings(port=0, prefix_cache=0, context_policy=policy)) as server:
        crowd = Crowd(server, engine, **more)
        for name in "ab":
            crowd.add(name, max_tokens=1)
        texts = crowd.texts()
        assert server.metric("shardmill_unsliced_total") == 1
    assert texts[1:] == [alone("a", 1), alone("b", 1)]


def test_a_client_that_leaves_between_its_slices_leaves_no_copy() -> None:
    engine = Copier()
    with running(fake_model(engine), Settings(port=0, prefix_cache=0)) as server:
        link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        engine.hold()
        body = json.dumps(ask(prompt="Long", max_tokens=LONG, user="L"))
        link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert engine.reached.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server.post, ask(prompt="a", max_tokens=SLICE))
            wait_until(lambda: server.metric("shardmill_queue_length") == 1)
            engine.stops_at = "a"
            engine.free.set()
            wait_until(lambda: server.metric("shardmill_set_aside_bytes") > 0)
            link.close()
            wait_until(lambda: server.metric("shardmill_queue_length") == 0)  # the long one waits no more
            engine.free.set()
            assert other.result()[0] == 200
        wait_until(lambda: server.metric("shardmill_running") == server.metric("shardmill_queue_length") == 0)
        assert not engine.copies and server.metric("shardmill_set_aside_bytes") == 0


def test_the_failure_of_another_leaves_a_sliced_answer_as_it_is() -> None:
    """The other's text had nothing to do with it, and its copy was whole before."""
    engine = Copier()
    with running(fake_model(engine), Settings(port=0)) as server:
        crowd = Crowd(server, engine)
        crowd.add("~", max_tokens=4)
        failed = crowd.answers.pop()
        crowd.add("a", max_tokens=LONG)
        assert crowd.texts() == [alone("Long", LONG), alone("a", LONG)]
        assert failed.result()[0] == 500


def test_a_draft_model_s_text_waits_with_the_answer() -> None:
    """It is the model itself, so all its drafts are right unless it reads another answer's text."""
    model = replace(fake_model(Copier()), draft_session=Session(Copier()))
    with running(model, Settings(port=0, prefix_cache=0, drafter="draft_model", policy="always")) as server:
        crowd = Crowd(server, model.engine)
        crowd.add("a", max_tokens=LONG)
        assert crowd.texts() == [alone("Long", LONG), alone("a", LONG)]
        drafted, accepted = (
            server.metric(f'shardmill_{kind}_tokens_total{{drafter="draft_model"}}') for kind in ("drafted", "accepted")
        )
        assert server.metric("shardmill_turns_total") >= 2
    assert drafted == accepted > 0


def test_a_server_that_ends_finishes_what_has_begun() -> None:
    """Also an answer that waits after a slice; those that have not begun are told at once."""
    engine = Copier(delay=0.002)
    with running(fake_model(engine), Settings(port=0, prefix_cache=0)) as server:
        crowd = Crowd(server, engine)
        crowd.add("a", max_tokens=LONG)
        engine.free.set()
        wait_until(lambda: server.metric("shardmill_turns_total") >= 2)
        server.worker.refuse()
        assert crowd.texts() == [alone("Long", LONG), alone("a", LONG)]
    assert not engine.copies


def test_a_key_is_one_client_however_many_connections_it_has() -> None:
    """But each user that it names is one."""
    engine = Copier()
    with running(fake_model(engine), Settings(port=0, prefix_cache=0)) as server:
        engine.turns = ""
        crowd = Crowd(server, engine)
        mine, yours = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
        for name, key, user in (("a", mine, ""), ("b", mine, ""), ("c", mine, "c"), ("d", mine, "c"), ("e", yours, "")):
            crowd.add(name, key, user=user, max_tokens=1)
        crowd.texts()
    order = [name for name in dict.fromkeys(engine.turns) if name != "L"]
    assert order == ["a", "c", "e", "b", "d"]


REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 20},
    {"max_tokens": 30, "temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"max_tokens": 9, "temperature": 1.1, "seed": 4},
    {"max_tokens": 25, "presence_penalty": 1.0},
    {"max_tokens": 12, "stop": ["="]},
]


def say(server: Running, request: Mapping[str, Any]) -> tuple[Any, ...]:
    """An answer with its numbers."""
    status, answer = server.post({"temperature": 0, "logprobs": 2, "model": "tiny", **request})
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"], choice["logprobs"]


@pytest.fixture(scope="module")
def model() -> Model:
    """The tiny model on its real programs in fp16, with two adapters, and itself as its draft model."""
    build = once("adapters-sliced", lambda folder: adapters.build(folder, "phi3"))
    for seed, name in enumerate(("first", "second"), start=1):
        if not (build / "adapters" / name).exists():
            add_adapter(build, adapters.write_lora(build / "source", build.parent / f"lora-{name}", seed, 0.25), name)
    return load_model(build, build, "fp16")


@pytest.mark.thorough(but=["3"])
@pytest.mark.skipif(not is_portable(), reason="compares bits of the portable engine's fp16")
@pytest.mark.parametrize("texts", [0, 3, 1000])
def test_a_crowd_gets_the_bits_that_each_gets_alone(model: Model, texts: int) -> None:
    """In fp16, with adapters and all drafters, and after kept prefixes were evicted."""
    cache = texts * BLOCK * model.engine.copy_bytes()[0]
    names = ("none", "ngram", "suffix", "learned", "draft_model")
    rng = random.Random(2)
    requests = [
        {
            **request,
            "prompt": [rng.randrange(1, tiny.VOCAB) for _ in range(rng.choice([3, 16]))] * 2,
            "model": rng.choice(["tiny", "tiny:first", "tiny:second"]),
        }
        for request in REQUESTS * 3
    ]
    with running(model, Settings(port=0, prefix_cache=0, drafter="none")) as server:
        wanted = [say(server, request) for request in requests]
    asked = [one | {"shardmill": {"drafter": names[i % len(names)]}} for i, one in enumerate(requests)]
    with (
        running(model, Settings(port=0, prefix_cache=cache, policy="always")) as server,
        ThreadPoolExecutor(SET_ASIDE + 1) as pool,
    ):
        found = list(pool.map(lambda one: say(server, one), asked))
        assert server.metric("shardmill_turns_total") > len(requests)
        assert server.metric("shardmill_unsliced_total") == server.metric("shardmill_set_aside_bytes") == 0
        assert (server.metric("shardmill_prefix_cache_evictions_total") > 0) == (texts == 3)
    different = [i for i, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]
    assert not different, [asked[i] for i in different]
