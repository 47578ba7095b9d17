"""An answer is handed over by the pass, and not more often than a reader could tell; no token is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from drafted_decoding import Options, PrefillEvent, TokenEvent

from shardmill.serve.jobs import PAUSE, Item, Job, Work
from shardmill.serve.protocol import broken

OWN, DRAFT, END = TokenEvent(1, from_draft=False), TokenEvent(2, from_draft=True), broken()


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time goes on when a test says so."""

    now = 0.0

    def time(self) -> float:
        return self.now


def scenario(play: Callable[[Job, Clock], Coroutine[Any, Any, None]]) -> None:
    """Play with a job on a loop of its own."""

    async def begin() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Clock)
        failed: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: failed.append(context))
        await play(Job(Work((1,), 9, "none", Options(), ())), loop)
        assert not failed

    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(begin())


async def given(taking: asyncio.Task[list[Item]]) -> list[Item] | None:
    """What `take` has returned once the loop has nothing left to do; None if it still waits."""
    for _ in range(5):
        await asyncio.sleep(0)
    return taking.result() if taking.done() else None


def test_the_tokens_of_a_pass_come_together() -> None:
    async def play(job: Job, loop: Clock) -> None:
        taking = asyncio.ensure_future(job.take())
        job.put(DRAFT)
        job.put(DRAFT)
        assert await given(taking) is None
        job.put(OWN)
        assert await given(taking) == [DRAFT, DRAFT, OWN]
        taking = asyncio.ensure_future(job.take())
        job.put(DRAFT)  # a draft that ends the text has no token after it
        job.put(END)
        assert await given(taking) == [DRAFT, END]

    scenario(play)


@pytest.mark.parametrize("between", [PAUSE / 4, PAUSE / 2])
def test_passes_that_are_fast_come_together(between: float) -> None:
    """The first two come at once, then all of a pause: also if the engine stops, and the end as soon as it is there."""

    async def play(job: Job, loop: Clock) -> None:
        for _ in range(2):
            taking = asyncio.ensure_future(job.take())
            job.put(OWN)
            assert await given(taking) == [OWN]
            loop.now += between
        for _ in range(3):
            taking = asyncio.ensure_future(job.take())
            job.put(OWN)
            job.put(OWN)
            assert await given(taking) is None
            loop.now += PAUSE
            assert await given(taking) == [OWN, OWN]
        taking = asyncio.ensure_future(job.take())
        job.put(OWN)
        assert await given(taking) is None
        job.put(END)
        assert await given(taking) == [OWN, END]

    scenario(play)


def test_after_a_pause_in_which_nothing_came_a_token_comes_at_once() -> None:
    async def play(job: Job, loop: Clock) -> None:
        for between in (PAUSE / 4, PAUSE / 4, 2 * PAUSE, 2 * PAUSE):
            taking = asyncio.ensure_future(job.take())
            loop.now += between
            await given(taking)
            job.put(OWN)
            assert await given(taking) == [OWN]

    scenario(play)


def test_who_wants_the_whole_answer_is_woken_at_its_end() -> None:
    async def play(job: Job, loop: Clock) -> None:
        job.put(OWN)
        early = asyncio.ensure_future(job.take(whole=True))
        assert await given(early) == [OWN]  # it was there before anybody said what is wanted
        taking = asyncio.ensure_future(job.take(whole=True))
        items: list[Item] = [PrefillEvent(1, 1), OWN, DRAFT, OWN]
        for item in items:
            job.put(item)
            loop.now += PAUSE
            assert await given(taking) is None
        job.put(END)
        assert await given(taking) == [*items, END]

    scenario(play)


def test_a_wait_that_was_given_up_loses_nothing() -> None:
    async def play(job: Job, loop: Clock) -> None:
        taking = asyncio.ensure_future(job.take())
        await given(taking)
        taking.cancel()
        job.put(OWN)
        assert await given(asyncio.ensure_future(job.take())) == [OWN]

    scenario(play)
