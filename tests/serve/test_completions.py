"""Text completions, through OpenAI's client and over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from drafted_decoding import Options, Sampling, Session, run
from drafted_decoding.drafters import BY_ITSELF
from patience import PATIENCE, wait_until
from tokenizers import Tokenizer, decoders, models

from shardmill.serve.model import Limits, Settings

from .fake import NAME, Reciter, Speaker, fake_model
from .running import Running, ask, running

JSON = {"Content-Type": "application/json"}
TEXT = "naïve() → “é”  # 東京 🙂\nand so on\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model(), Settings(port=0, limits=Limits(max_tokens=100))) as up:
        yield up


@pytest.fixture(scope="module")
def reciter() -> Iterator[Running]:
    with running(fake_model(Reciter(TEXT))) as up:
        yield up


def test_every_answer_of_an_ungated_build_says_so(server: Running) -> None:
    """The pages, whole answers, streams and errors; what failed is on /health."""
    asked = [("GET", "/health", None), ("GET", "/v1/models", None), ("GET", "/nowhere", None)]
    asked += [("POST", "/v1/completions", ask(stream=streamed)) for streamed in (False, True)]
    with running(fake_model(), Settings(port=0, ungated=("residency head_0: ineligible is 1",))) as ungated:
        for up, header in ((ungated, "see /health"), (server, None)):
            answers = [
                up.request(way, path, json.dumps(body).encode() if body else None, JSON) for way, path, body in asked
            ]
            assert {headers.get("shardmill-ungated") for _, headers, _ in answers} == {header}
        health = [json.loads(up.request("GET", "/health")[2]) for up in (ungated, server)]
    assert health == [{"status": "ok", "ungated": ["residency head_0: ineligible is 1"]}, {"status": "ok"}]


def alone(prompt: str, tokens: int, sampling: Sampling | None = None) -> str:
    """What plain decoding on a fresh engine says."""
    model = fake_model(Speaker())
    prompt_tokens = model.encode(prompt)
    options = Options(sampling=sampling or Sampling(), detokenize=model.decode)
    return run(Session(model.engine), prompt_tokens, max_new_tokens=tokens, eos=model.eos, options=options).text


def test_an_answer_is_what_plain_decoding_says(server: Running) -> None:
    """Text, finish reason and usage of a whole answer."""
    answer = server.client().completions.create(**ask())
    assert answer.choices[0].text == alone("Once upon a time", 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == NAME and answer.system_fingerprint == "fake-1"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (16, 24, 40)


def test_a_stream_is_the_same_answer_in_pieces(server: Running) -> None:
    """Pieces join to the whole answer, the last has the finish reason, usage follows if it was asked for."""
    chunks = list(server.client().completions.create(**ask(), stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == alone("Once upon a time", 24)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    assert len({c.id for c in chunks}) == 1


def test_a_stream_ends_with_done(server: Running) -> None:
    """The bytes on the wire: one event per chunk, and the usual last one."""
    import json

    body = json.dumps(ask(stream=True)).encode()
    status, headers, answer = server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    events = answer.decode().split("\n\n")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


@pytest.mark.parametrize("cut", [1, 3, 14, 15])
def test_no_character_is_ever_split(reciter: Running, cut: int) -> None:
    """Every piece of a stream is whole characters, wherever the prompt ends, though every token is one byte."""
    chunks = list(reciter.client().completions.create(**ask(prompt=TEXT[:cut], max_tokens=200), stream=True))
    pieces = [c.choices[0].text for c in chunks]
    assert "".join(pieces) == TEXT[cut:]
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[-1].choices[0].finish_reason == "stop"  # the end-of-text token, which shows nowhere


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_never_shows(reciter: Running, stream: bool) -> None:
    """The answer ends before it, and so do the log-probabilities: not one of its tokens leaves."""
    request = ask(prompt=TEXT[:2], max_tokens=200, stop=["京 🙂", "never"], logprobs=1, stream=stream)
    answer = reciter.client().completions.create(**request)
    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    expected = TEXT[2 : TEXT.index("京")]
    assert "".join(c.text for c in choices) == expected
    assert choices[-1].finish_reason == "stop"
    tokens = sum(len(c.logprobs.tokens) for c in choices if c.logprobs is not None)
    assert tokens == len(expected.encode())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_begins_inside_a_token_never_shows(stream: bool) -> None:
    """Nor does the token's log-probability, which would tell it: the text before it is out, its entry is not."""
    words = Tokenizer(models.WordLevel({"one": 0, " two": 1, " three": 2, "<|end|>": 3}, unk_token="one"))
    words.decoder = decoders.Fuse()

    class Counting(Speaker):
        vocab = 4

        def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
            return np.eye(4, dtype=np.float32)[[min(p + 1, 3) for p in positions]] * 20

    model = replace(fake_model(), engine=Counting(), tokenizer=words, eos=(3,))
    for stop, text, tokens in (("three", " two ", [" two"]), ("two", " ", []), (" three", " two", [" two"])):
        with running(model) as up:
            answer = up.client().completions.create(**ask(prompt=[0], stop=[stop], logprobs=1, stream=stream))
            choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        assert "".join(c.text for c in choices) == text
        assert [t for c in choices if c.logprobs is not None for t in c.logprobs.tokens or ()] == tokens


def test_a_seed_gives_the_same_answer_again(server: Running) -> None:
    """Whatever ran in between; another seed, and no seed, give others."""
    create = server.client().completions.create
    request = ask(temperature=1.1, max_tokens=60)
    first = create(**request, seed=7).choices[0].text
    others = {create(**request, seed=8).choices[0].text, *(create(**request).choices[0].text for _ in range(3))}
    assert create(**request, seed=7).choices[0].text == first
    assert len(others) == 4 and first not in others
    assert create(**request, seed=-1).choices[0].text == create(**request, seed=2**64 - 1).choices[0].text


def test_a_seed_outlives_a_restart() -> None:
    """Two servers of the same model give the same answer, whatever they answered before."""
    request = ask(temperature=1.1, max_tokens=40, seed=11)
    with running(fake_model()) as up:
        first = up.client().completions.create(**request).choices[0].text
    with running(fake_model()) as up:
        up.client().completions.create(**ask(prompt="Something else", temperature=1))
        assert up.client().completions.create(**request).choices[0].text == first


@pytest.mark.parametrize("temperature", [0, 1.1])
def test_choices_are_the_answers_to_seeds_that_count_up(server: Running, temperature: float) -> None:
    """`n` choices: each what a request with its seed gets; the prompt is counted once, and later ones reuse it."""
    create = server.client().completions.create
    single = [create(**ask(temperature=temperature, seed=seed)).choices[0].text for seed in (5, 6, 7)]
    answer: Any = create(**ask(temperature=temperature, seed=5, n=3, best_of=3, logprobs=0))
    assert [choice.text for choice in answer.choices] == single and [c.index for c in answer.choices] == [0, 1, 2]
    assert len(set(single)) == (3 if temperature else 1)
    assert answer.usage.prompt_tokens == len("Once upon a time") and answer.usage.completion_tokens == 3 * 24
    streamed: dict[int, str] = {}
    options: Any = {"include_usage": True}
    for chunk in create(**ask(temperature=temperature, seed=5, n=3), stream=True, stream_options=options):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert list(streamed.values()) == single and chunk.usage == answer.usage


def test_choices_that_find_no_place_leave_none_behind() -> None:
    """All of them or none: the places that were taken already are given back."""
    engine = Speaker()
    with running(fake_model(engine), Settings(port=0, limits=Limits(queue=2))) as up:
        engine.hold()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(up.post, ask())
            assert engine.reached.wait(PATIENCE)
            status, answer = up.post(ask(n=3))
            assert status == 429 and answer["error"]["code"] == "queue_full"
            wait_until(lambda: up.metric("shardmill_queue_length") == 0)
            engine.free.set()
            assert other.result(PATIENCE)[0] == 200
        assert up.post(ask(n=3))[0] == 200


@pytest.mark.parametrize("asked", [{"n": 4}, {"n": 2, "prompt": ["a", "b"]}])
def test_more_choices_than_there_are_places_are_refused_for_good(asked: dict[str, Any]) -> None:
    """A 429 would ask the client to come again."""
    with running(fake_model(), Settings(port=0, limits=Limits(queue=2))) as up:
        status, answer = up.post(ask(**asked))
    assert (status, answer["error"]["param"]) == (400, "n")
    assert answer["error"]["message"] == "the request asks for 4 answers, at most 3 find a place: ask for fewer"


def test_stream_options_need_a_stream(server: Running) -> None:
    """As in OpenAI's API: an error without a stream; with usage, every other chunk has none."""
    status, answer = server.post(ask(stream_options={"include_usage": True}))
    assert status == 400 and "stream_options is only allowed with stream: true" in answer["error"]["message"]
    options: Any = {"include_usage": True}
    *chunks, last = server.client().completions.create(**ask(), stream=True, stream_options=options)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks) and last.usage
    plain = server.client().completions.create(**ask(), stream=True)
    assert not any("usage" in chunk.model_fields_set for chunk in plain)


def test_sampling_fields_reach_the_sampler(server: Running) -> None:
    """temperature, top_p, top_k, logit_bias and penalties change the distribution as decode does it alone."""
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.5}
    request = ask(temperature=1.5, seed=3, top_p=0.9, extra_body=extra, **penalties)
    sampling = Sampling(temperature=1.5, seed=3, top_p=0.9, **extra, **penalties)  # type: ignore[arg-type]
    assert alone("Once upon a time", 24, sampling) != alone(
        "Once upon a time", 24, replace(sampling, presence_penalty=0)
    )
    assert server.client().completions.create(**request).choices[0].text == alone("Once upon a time", 24, sampling)
    x = fake_model().encode("x")[0]
    biased = server.client().completions.create(**ask(logit_bias={str(x): 100}))
    assert biased.choices[0].text == "x" * 24


def test_logprobs_of_a_completion(reciter: Running) -> None:
    """Tokens, their log-probabilities, the likeliest others and where each begins in the text."""
    answer = reciter.client().completions.create(**ask(prompt=TEXT[:16], max_tokens=7, logprobs=3))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    text = answer.choices[0].text
    assert text == " 東京"
    assert len(logprobs.tokens or []) == 7
    assert all(-1e-3 < value <= 0 for value in logprobs.token_logprobs)  # the reciter is sure
    assert logprobs.text_offset == [0, 1, 1, 1, 2, 2, 2]
    assert all(len(top) <= 3 for top in logprobs.top_logprobs)  # tokens that print alike share an entry


def test_pieces_carry_the_logprobs_of_the_whole(server: Running) -> None:
    """A stream's log-probabilities join to those of the same answer in one piece."""
    whole = server.client().completions.create(**ask(logprobs=2, seed=1, temperature=1)).choices[0].logprobs
    chunks = server.client().completions.create(**ask(logprobs=2, seed=1, temperature=1), stream=True)
    pieces = [c.choices[0].logprobs for c in chunks]
    assert whole is not None and whole.token_logprobs is not None
    assert [x for p in pieces if p is not None for x in p.token_logprobs or ()] == whole.token_logprobs
    assert [x for p in pieces if p is not None for x in p.text_offset or ()] == whole.text_offset


def test_a_prompt_may_be_tokens(server: Running) -> None:
    """A list of tokens, and a list of one text, ask the same as the text."""
    text = alone("Once upon a time", 24)
    tokens = fake_model().encode("Once upon a time")
    assert server.client().completions.create(**ask(prompt=tokens)).choices[0].text == text
    assert server.client().completions.create(**ask(prompt=["Once upon a time"])).choices[0].text == text


@pytest.mark.parametrize("tokens", [False, True])
def test_several_prompts_have_the_answers_that_each_has_alone(server: Running, tokens: bool) -> None:
    """The choices of the first prompt come first, as in OpenAI's API; every prompt counts once."""
    texts: Any = ["Once upon a time", "Twice", "Once upon a time there was"]
    prompts: Any = [fake_model().encode(text) for text in texts] if tokens else texts
    create: Any = server.client().completions.create
    body = {"temperature": 1, "seed": 3, "n": 2, "logprobs": 1}
    alone = [create(**ask(prompt=text, **body)) for text in texts]
    single = [(c.text, c.logprobs, c.finish_reason) for one in alone for c in one.choices]
    answer: Any = create(**ask(prompt=prompts, **body))
    assert [(c.text, c.logprobs, c.finish_reason) for c in answer.choices] == single
    assert [choice.index for choice in answer.choices] == [*range(6)]
    used = sum(map(len, texts)), sum(one.usage.completion_tokens for one in alone)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == used
    streamed = [""] * 6
    chunks: Any = create(**ask(prompt=prompts, **body), stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [text for text, *_ in single]
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == used


@pytest.mark.parametrize("drafter", BY_ITSELF)
def test_a_drafter_changes_nothing_but_speed(server: Running, drafter: str) -> None:
    """Every drafter that a request may name gives the same text; figures say what it took."""
    extra = {"shardmill": {"drafter": drafter, "private": True, "figures": True}}
    answer = server.client().completions.create(**ask(max_tokens=80), extra_body=extra)
    assert answer.choices[0].text == alone("Once upon a time", 80)
    figures = (answer.model_extra or {})["shardmill"]
    assert figures["passes"] == len(figures["accepted"]) == len(figures["drafted"])
    assert figures["passes"] + sum(figures["accepted"]) == 79  # the first token comes with the prefill
    if drafter == "none":
        assert sum(figures["drafted"]) == 0


@pytest.mark.parametrize("drafter", [name for name in BY_ITSELF if name != "none"])
def test_drafts_of_a_repetitive_text_are_accepted(drafter: str) -> None:
    """The request's drafter is really asked."""
    text = "the fox and the hen " * 10
    with running(fake_model(Reciter(text))) as up:
        request = ask(prompt=text[:60], max_tokens=120, shardmill={"drafter": drafter, "figures": True})
        status, answer = up.post(request)
        assert (status, answer["choices"][0]["text"]) == (200, text[60:180])
        assert sum(answer["shardmill"]["accepted"]) > 0


@pytest.mark.parametrize("margin", [0.0, 1e9])
def test_the_guard_runs_close_rows_again(margin: float) -> None:
    """With a margin that nothing reaches, every row of a pass with drafts; without one, none."""
    text = "the fox and the hen " * 10
    with running(fake_model(Reciter(text)), Settings(port=0, guard_margin=margin)) as up:
        _, answer = up.post(ask(prompt=text[:60], max_tokens=60, shardmill={"drafter": "ngram", "figures": True}))
    figures = answer["shardmill"]
    assert answer["choices"][0]["text"] == text[60:120]
    rows = sum(a + 1 for a, d in zip(figures["accepted"], figures["drafted"], strict=True) if d)
    assert figures["verified_again"] == (rows if margin else 0)
    assert len(figures["pass_seconds"]) == figures["passes"]


def test_lossy_acceptance_says_so(server: Running) -> None:
    """Unasked, in a whole answer and in a stream's last chunk; an exact answer says nothing."""
    lossy = {"shardmill": {"accept_top_p": 0.9}}
    assert server.client().completions.create(**ask(), extra_body=lossy).model_extra == {"shardmill": {"lossy": True}}
    *_, last = server.client().completions.create(**ask(), extra_body=lossy, stream=True)
    assert last.model_extra == {"shardmill": {"lossy": True}}
    assert not server.client().completions.create(**ask()).model_extra


def test_a_loose_draft_is_accepted_only_where_that_was_asked_for() -> None:
    """At 1 every draft is taken that is not impossible, so the text is another one."""
    text, options = "abcabcabcabcabc", {"figures": True, "drafter": "suffix"}
    with running(fake_model(), Settings(port=0, policy="always")) as up:
        exact, loose = (
            up.post(ask(prompt=text, max_tokens=60, shardmill={**options, **more}))[1]
            for more in ({}, {"accept_top_p": 1.0})
        )
    assert exact["choices"][0]["text"] == alone(text, 60) != loose["choices"][0]["text"]
    assert loose["shardmill"]["accepted"] == loose["shardmill"]["drafted"] and sum(loose["shardmill"]["drafted"]) > 0


@pytest.mark.thorough(but=["none", "suffix"])
@pytest.mark.parametrize("drafter", BY_ITSELF)
def test_a_sliding_context_goes_on(drafter: str) -> None:
    """Prompts and answers past the context, as far as the limits let them; the answer is the same whatever drafts."""
    limits = Limits(prompt_tokens=600, max_tokens=400)
    expected = run(
        Session(Speaker(), context_policy="slide"), fake_model().encode("many words " * 40), max_new_tokens=400
    ).tokens
    with running(fake_model(), Settings(port=0, limits=limits, context_policy="slide", policy="always")) as up:
        request = ask(prompt="many words " * 40, max_tokens=400, shardmill={"drafter": drafter, "figures": True})
        figures = up.post(request)[1]["shardmill"]
    assert figures["tokens"] == list(expected) and figures["finish_reason"] == "length"


def test_a_sliding_context_keeps_the_context_s_limits_unless_told() -> None:
    """An endless answer, or a prompt whose beginning would be forgotten, is the choice of who starts the server."""
    with running(fake_model(), Settings(port=0, context_policy="slide")) as up:
        status, answer = up.post(ask(max_tokens=257))
        assert (status, answer["error"]["message"]) == (400, "max_tokens is 257, at most 256 are allowed")
        assert up.post(ask(prompt="x" * 257))[0] == 400
        assert up.post(ask(prompt="x" * 250, max_tokens=100))[1]["usage"]["completion_tokens"] == 100


def test_a_shared_prefix_is_not_run_again(server: Running) -> None:
    """What a request shares with the one before is counted as cached, and the answer is the same."""
    create = server.client().completions.create
    create(**ask(prompt="a story about a fox"))
    answer = create(**ask(prompt="a story about a hen"))
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len("a story about a ")
    assert answer.choices[0].text == alone("a story about a hen", 24)


def test_a_long_prompt_gives_the_same(server: Running) -> None:
    """Looking for cancellations between its passes changes no token."""
    prompt = "many words " * 18
    assert server.client().completions.create(**ask(prompt=prompt)).choices[0].text == alone(prompt, 24)


def test_a_full_context_ends_the_answer(server: Running) -> None:
    """256 slots hold the prompt and all but the last token."""
    full = server.client().completions.create(**ask(prompt="x" * 250, max_tokens=50))
    assert full.usage is not None and full.usage.completion_tokens == 7
    assert full.choices[0].finish_reason == "length"
    for wanted, reason in ((7, "length"), (8, "context")):
        _, answer = server.post(ask(prompt="x" * 250, max_tokens=wanted, shardmill={"figures": True}))
        assert (len(answer["shardmill"]["tokens"]), answer["shardmill"]["finish_reason"]) == (7, reason)
    with pytest.raises(openai.BadRequestError, match="the prompt has 257 tokens, at most 256"):
        server.client().completions.create(**ask(prompt="x" * 257))


def test_a_request_that_names_no_temperature_is_sampled_as_the_model_says() -> None:
    usual = {"temperature": 1.5, "top_k": 5, "repetition_penalty": 1.1}
    cases: list[dict[str, Any]] = [{}, {"top_k": 3}, {"temperature": 0.8}, {"temperature": 0}]
    with running(replace(fake_model(), sampling=usual)) as told, running(fake_model()) as plain:
        for named in cases:
            request = {"model": NAME, "prompt": "Once", "max_tokens": 40, "seed": 3, **named}
            _, found = told.post(request)
            _, expected = plain.post(request if "temperature" in named else usual | request)
            assert found["choices"][0]["text"] == expected["choices"][0]["text"]
