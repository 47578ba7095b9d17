"""Clients take turns: whoever asks for much holds up nobody who asks for little; and conversations take turns, too."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import program_forms
import pytest
import tiny
from drafted_decoding import Options
from patience import PATIENCE, wait_until

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.machine import is_portable
from shardmill.serve.jobs import FairQueue, Job, Work
from shardmill.serve.model import Model, Settings

from .fake import Speaker, byte_tokenizer, fake_model
from .running import Running, ask, running


def test_clients_take_turns_and_keep_their_own_order() -> None:
    async def taken() -> list[str]:
        queue = FairQueue()
        jobs = {
            name: Job(Work((1,), 1, "none", Options(), ()), name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "b2")
        }
        names = {job: name for name, job in jobs.items()}
        for job in jobs.values():
            queue.add(job)
        assert len(queue) == 6 and {names[job] for job in queue} == {*jobs}
        queue.remove(jobs["a2"])
        order = [names[queue.take()] for _ in range(2)]
        queue.add(jobs["a2"])  # a has a job that waits, and so its place in the round
        return order + [names[queue.take()] for _ in range(len(queue))]

    assert asyncio.run(taken()) == ["a1", "b1", "c1", "a3", "b2", "a2"]


@pytest.mark.parametrize("by", ["user", "safety_identifier", "connection"])
def test_a_client_with_many_requests_does_not_hold_up_another(by: str) -> None:
    """Its second request waits until everybody else had a turn; so do the choices of one request."""
    engine, order = Speaker(), list[str]()
    with running(fake_model(engine)) as server, ThreadPoolExecutor(12) as pool:
        run = server.worker._take_turn

        def noted(job: Job) -> bool:
            order.append(byte_tokenizer().decode(job.work.prompt).split()[0])
            return run(job)

        server.worker._take_turn = noted  # type: ignore[method-assign]

        def post(name: str, i: int) -> int:
            given = {by: name} if by != "connection" else {"n": 5 if name == "greedy" else 1}
            return server.post(ask(prompt=f"{name} {i}", max_tokens=2, **given))[0]

        engine.hold()
        asked = [pool.submit(post, "first", 0)]
        assert engine.reached.wait(PATIENCE)
        asked += [pool.submit(post, "greedy", i) for i in range(5 if by != "connection" else 1)]
        wait_until(lambda: server.metric("shardmill_queue_length") == 5)
        asked.append(pool.submit(post, "modest", 0))
        wait_until(lambda: server.metric("shardmill_queue_length") == 6)
        engine.free.set()
        assert [one.result() for one in asked] == [200] * len(asked)
    assert order == ["first", "greedy", "modest", *["greedy"] * 4]


@pytest.fixture
def served(built: tiny.Build, fp32: None) -> Model:
    """The tiny model on its real programs, in fp32, with its own tokenizer."""
    tokenizer = read_tokenizer(built.source / "tokenizer.json")
    return replace(fake_model(), engine=program_forms.load(built), tokenizer=tokenizer)


def say(server: Running, prompt: list[int], **more: Any) -> tuple[str, int]:
    """An answer's text, and how many tokens of its prompt were not computed again."""
    body = ask(prompt=prompt, max_tokens=6, **more)
    status, answer = server.post(body)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.skipif(not is_portable(), reason="in fp16 two widths may round a near tie apart")
def test_conversations_in_turns_are_answered_as_alone_and_counted(served: Model, built: tiny.Build) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(1, tiny.VOCAB) for _ in range(40)] for _ in range(4)]
    with running(served, Settings(port=0, prefix_cache=0)) as server:
        alone = [say(server, prompt)[0] for prompt in prompts]
        assert server.metric("shardmill_prefix_cache_hits_total") == 0
    with running(served) as server:
        found = [say(server, prompt) for _ in range(3) for prompt in prompts]
        assert [text for text, _ in found] == alone * 3
        assert [cached for _, cached in found] == [0] * 4 + [32] * 8
        assert server.metric("shardmill_prefix_cache_hits_total") == 8
        assert server.metric("shardmill_prefix_cache_tokens_total") == 8 * 32
        position, _ = built_bytes(served)
        assert server.metric("shardmill_prefix_cache_bytes") == position * 32 * len(prompts)
        assert server.metric("shardmill_prefix_cache_evictions_total") == 0
        private = [rng.randrange(1, tiny.VOCAB) for _ in range(40)]
        for prompt in (private, prompts[0], private, prompts[0]):
            cached = say(server, prompt, shardmill={"private": prompt is private})[1]
            assert cached == (0 if prompt is private else 32)
    served.engine.drop_copies(list(served.engine.copies))  # type: ignore[attr-defined]
    with running(served, Settings(port=0, prefix_cache=position * 64)) as server:  # two conversations
        assert [say(server, prompt)[0] for _ in range(2) for prompt in prompts] == alone * 2
        assert 0 < server.metric("shardmill_prefix_cache_bytes") <= position * 64
        assert server.metric("shardmill_prefix_cache_evictions_total") > 0


def built_bytes(model: Model) -> tuple[int, int]:
    found: tuple[int, int] = model.engine.copy_bytes()  # type: ignore[attr-defined]
    return found


@pytest.mark.skipif(not is_portable(), reason="in fp16 two widths may round a near tie apart")
def test_after_a_failure_no_copy_is_used(served: Model) -> None:
    """A failed request may have left anything in the slots, and in copies."""
    prompt = list(range(1, 41))
    with running(served) as server:
        text, _ = say(server, prompt)
        say(server, prompt[::-1])
        assert server.metric("shardmill_prefix_cache_bytes") > 0
        forward, served.engine.forward = served.engine.forward, None  # type: ignore[method-assign, assignment]
        assert server.post(ask(prompt=prompt, max_tokens=6))[0] == 500
        served.engine.forward = forward  # type: ignore[method-assign]
        wait_until(lambda: server.metric("shardmill_prefix_cache_bytes") == 0)  # after the answer, before another
        assert say(server, prompt) == (text, 0)
