"""Decisions over HTTP: transformers' probabilities of whole labels, batches, chats, calibration, and refusals."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import limits
import program_forms
import pytest
import tiny
import torch
from drafted_decoding import LabelCalibration
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE, wait_until
from tokenizers import Tokenizer, models, processors

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import ShardmillError
from shardmill.machine import is_portable
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place
from shardmill.serve.model import Limits, Model, Settings, read_decide_calibration

from .fake import NAME, Speaker, fake_model, template
from .running import Running, ask, running
from .test_drawn_requests import TEXT, VALUE

PATH = "/v1/decide"
TEXTS = ["def decode(self, s", "    if not isinstance(", 'raise JSONDecodeError("Expecting value']
FEW = [" return", " not", "None"]  # each a single token
LABELS = [" yes", " no", "return", "return None", ", err)", "\n", "()"]
ONE, FIVE = (limits.logprobs(limits.model(tiny.LAYERS, tiny.FFN), 2, tiny.VOCAB, tokens) for tokens in (1, 5))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model(), Settings(port=0, limits=Limits(prompt_tokens=60, body_bytes=100_000, queue=2))) as up:
        yield up


@pytest.fixture
def decider(built: tiny.Build, fp32: None) -> Model:
    """The tiny model on its real programs, in fp32, with its own tokenizer."""
    return replace(
        fake_model(), engine=program_forms.load(built), tokenizer=read_tokenizer(built.source / "tokenizer.json")
    )


def decide(server: Running, **body: Any) -> dict[str, Any]:
    status, answer = server.post({"model": NAME, **body}, PATH)
    assert status == 200, answer
    return answer


def probabilities(row: dict[str, Any]) -> dict[str, float]:
    return {one["label"]: one["probability"] for one in row["labels"]}


def logprobs(row: dict[str, Any]) -> dict[str, float]:
    return {one["label"]: one["logprob"] for one in row["labels"]}


def expected(
    model: Any, tokenizer: Any, text: str, labels: Sequence[str], before: Sequence[int] = ()
) -> dict[str, float]:
    """The log-probability of each label, from transformers' logits over the tokens of the whole text."""
    prompt, found = [*before, *tokenizer.encode(text, add_special_tokens=False).ids], {}
    for label in labels:
        whole = [*before, *tokenizer.encode(text + label, add_special_tokens=False).ids]
        assert whole[: len(prompt)] == prompt  # of these texts no token reaches into a label
        with torch.no_grad():
            rows = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        found[label] = sum(float(rows[i - 1, whole[i]]) for i in range(len(prompt), len(whole)))
    return found


@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_probabilities_are_those_of_transformers(built: tiny.Build, decider: Model) -> None:
    """To fp32's rounding, of whole labels; of `return None` only what `return` does not have."""
    witness = tiny.transformers_model(built.source, tiny.dequantised(built))
    with running(decider) as server:
        answer = decide(server, input=TEXTS, labels=LABELS)
    for text, row in zip(TEXTS, answer["data"], strict=True):
        logs = expected(witness, decider.tokenizer, text, LABELS)
        shares = {label: math.exp(log) for label, log in logs.items()}
        shares["return"] -= shares["return None"]
        total = sum(shares.values())
        limits.numbers_agree(f"labels after {text!r}", logprobs(row), logs, FIVE, size=1)
        shared = {label: one / total for label, one in shares.items()}
        limits.numbers_agree(f"probabilities after {text!r}", probabilities(row), shared, ONE, size=1)
        assert row["label"] == max(shares, key=shares.__getitem__)
    assert len({row["label"] for row in answer["data"]}) > 1


@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
@pytest.mark.parametrize("form", ["$A <|end|>", "<|end|> $A", "<|end|> $A <|end|> <|end|>"])
def test_no_special_token_comes_between_a_text_and_its_label(built: tiny.Build, decider: Model, form: str) -> None:
    """Some tokenizers put one after every text, and a label would be judged by whether the text ends with it."""
    witness = tiny.transformers_model(built.source, tiny.dequantised(built))
    added = read_tokenizer(built.source / "tokenizer.json")
    end = added.encode("<|end|>").ids[0]
    added.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<|end|>", end)])
    assert added.encode(TEXTS[0]).special_tokens_mask.count(1) == form.count("end")
    before = [end] if form.startswith("<") else []
    with running(replace(decider, tokenizer=added)) as server:
        row = decide(server, input=TEXTS[0], labels=LABELS)["data"][0]
        said = server.client().completions.create(**ask(prompt=TEXTS[0], max_tokens=1, logprobs=1)).choices[0]
    wanted = expected(witness, added, TEXTS[0], LABELS, before)
    limits.numbers_agree("labels", logprobs(row), wanted, FIVE, size=1)
    with torch.no_grad():
        fed = torch.tensor([[*before, *added.encode(TEXTS[0], add_special_tokens=False).ids]])
        likeliest = witness(fed).logits[0, -1]
    assert said.logprobs is not None and said.logprobs.token_logprobs is not None
    most = likeliest.log_softmax(-1).max()
    limits.numbers_agree("the likeliest token", said.logprobs.token_logprobs[0], most, ONE, size=1)


@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_log_probabilities_agree_with_completions(decider: Model) -> None:
    """A completion reports for its tokens what the same tokens have as a label."""
    with running(decider) as server:
        said = server.client().completions.create(**ask(prompt=TEXTS[0], max_tokens=3, logprobs=1))
        choice = said.choices[0]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        row = decide(server, input=TEXTS[0], labels=[choice.text, "no"])["data"][0]
    both = logprobs(row)[choice.text], sum(choice.logprobs.token_logprobs)
    limits.numbers_agree("a label and a completion", *both, FIVE, size=1)


@pytest.fixture
def restricted(decider: Model, built: tiny.Build, tmp_path: Path) -> tuple[Model, list[int]]:
    """The same model with a program for some labels, and how many tokens each of its passes had."""
    parts, plan = tiny.split(built.source, program={"labels": FEW})
    own = tiny.convert(parts["labels"], built.source, tmp_path / "labels.mlpackage")
    engine = Engine(in_place(plan, {**built.packages, "labels": own}, built.table), Path("/"))
    calls, run = [], engine.forward_labels

    def forward_labels(tokens: Sequence[int], *places: Sequence[int]) -> Any:
        calls.append(len(tokens))
        return run(tokens, *places)

    engine.forward_labels = forward_labels  # type: ignore[method-assign]
    return replace(decider, engine=engine), calls


@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_labels_with_a_program_of_their_own_have_transformers_probabilities(
    built: tiny.Build, restricted: tuple[Model, list[int]]
) -> None:
    """One pass of each text runs it; what it leaves in the engine is what the whole head leaves."""
    witness, (model, calls) = tiny.transformers_model(built.source, tiny.dequantised(built)), restricted
    model = replace(model, calibration=LabelCalibration(2.0, {FEW[0]: 1.0}))
    with running(model) as server:
        few = decide(server, input=TEXTS, labels=FEW, logprobs=False)
        assert len(calls) == len(TEXTS)
        whole = decide(server, input=TEXTS, labels=FEW)
        again = decide(server, input=TEXTS, labels=FEW[1:], logprobs=False)
        assert len(calls) == 2 * len(TEXTS)
        others = decide(server, input=TEXTS, labels=[*FEW, " of"], logprobs=False)
        assert len(calls) == 2 * len(TEXTS)
    for i, text in enumerate(TEXTS):
        logits = torch.tensor([*expected(witness, model.tokenizer, text, FEW).values()], dtype=torch.float64) / 2
        logits[0] += 1
        found, row = probabilities(few["data"][i]), whole["data"][i]
        limits.numbers_agree("labels' own head", [found[label] for label in FEW], logits.softmax(0), ONE, size=1)
        limits.numbers_agree("either head", found, probabilities(row), ONE, size=1)
        assert [one["label"] for one in few["data"][i]["labels"]] == [one["label"] for one in row["labels"]]
        shares = probabilities(others["data"][i])
        assert {one: shares[one] / (1 - shares[" of"]) for one in FEW} == pytest.approx(probabilities(row))
        assert [*probabilities(again["data"][i])] == [one for one in found if one != FEW[0]]


def test_an_answer_without_log_probabilities_has_the_same_shares(server: Running) -> None:
    labels = ["yes", "no", "maybe", "may"]
    whole = decide(server, input=["is it?", "was it?"], labels=labels)["data"]
    few = decide(server, input=["is it?", "was it?"], labels=labels, logprobs=False)["data"]
    assert [{*one} for row in few for one in row["labels"]] == [{"label", "probability"}] * 8
    assert [*map(probabilities, few)] == [*map(probabilities, whole)]
    messages = [{"role": "user", "content": "A?"}]
    (chat,) = decide(server, messages=messages, labels=["a", "b"], logprobs=False)["data"]
    assert not any("logprob" in one for one in chat["labels"])


def test_a_batch_says_what_single_texts_say(server: Running) -> None:
    """In their order, in OpenAI's form of a list; the likeliest label comes first."""
    texts = [f"text {i}: is this {word}?" for i, word in enumerate(["good", "bad", "so"] * 4)]
    labels = ["yes", "no", "maybe", "may"]
    together = decide(server, input=texts, labels=labels)
    assert together["object"] == "list" and together["model"] == NAME
    assert [row["index"] for row in together["data"]] == list(range(len(texts)))
    for text, row in zip(texts, together["data"], strict=True):
        (alone,) = decide(server, input=text, labels=labels)["data"]
        assert row["object"] == "decision" and row["labels"] == alone["labels"]
        shares = [one["probability"] for one in row["labels"]]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
        assert row["label"] == row["labels"][0]["label"] and {one["label"] for one in row["labels"]} == {*labels}
    assert together["usage"]["prompt_tokens"] == together["usage"]["total_tokens"] == sum(map(len, texts))
    assert server.metric("shardmill_decisions_total") >= 2 * len(texts)
    assert server.metric('shardmill_requests_total{endpoint="/v1/decide",status="200"}') > len(texts)


def test_a_chat_is_a_text_that_ends_where_the_answer_begins(server: Running) -> None:
    messages = [{"role": "system", "content": "Say yes or no."}, {"role": "user", "content": "A?"}]
    chat = decide(server, messages=messages, labels=["yes", "no"])["data"]
    assert chat == decide(server, input=template(messages), labels=["yes", "no"])["data"]


def test_a_label_is_tokenised_as_it_continues_the_text(decider: Model) -> None:
    """The tokenizer may join the text's end with the label; then the joined token, which the model sees, is scored."""
    text = next(
        text
        for end in range(30, 400)
        if len((text := tiny.sample_text()[:end]).strip()) > 3
        and decider.encode(text + "r")[: len(decider.encode(text))] != decider.encode(text)
    )[-24:]
    prompt, whole = decider.encode(text), decider.encode(text + "r")
    shared = next(i for i, token in enumerate(prompt) if whole[i] != token)
    with running(decider) as server:
        answer = decide(server, input=text, labels=["r", "?"])
    assert answer["usage"]["prompt_tokens"] == shared < len(prompt)


def test_a_calibration_changes_probabilities_and_no_log_probability() -> None:
    model = fake_model()
    calibrated = replace(model, calibration=LabelCalibration(2.0, {"b": 5.0}))
    with running(model) as plain, running(calibrated) as server:
        before = decide(plain, input="say", labels=["a", "b", "c"])["data"][0]
        after = decide(server, input="say", labels=["a", "b", "c"])["data"][0]
    assert logprobs(before) == logprobs(after)
    logits = torch.tensor([logprobs(before)[label] / 2 + 5 * (label == "b") for label in "abc"], dtype=torch.float64)
    assert [probabilities(after)[label] for label in "abc"] == pytest.approx(logits.softmax(0).tolist())
    assert after["label"] == "b" and before["label"] != "b"


def test_a_calibration_has_the_form_of_encoders(tmp_path: Path) -> None:
    file = tmp_path / "decide_calibration.json"
    file.write_text(json.dumps({"operating_points": {"default": {"temperature": 1.5, "biases": {"yes": -0.5}}}}))
    assert read_decide_calibration(file) == LabelCalibration(1.5, {"yes": -0.5})
    wrong: list[Any] = [{}, {"operating_points": {"default": {"temperature": 0}}}]
    for content in [*wrong, {"operating_points": {"default": {"biases": {"a": "high"}}}}]:
        file.write_text(json.dumps(content))
        with pytest.raises(ShardmillError, match=str(file)):
            read_decide_calibration(file)


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"labels": ["a"]}, "give either input or messages", None),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}], "labels": ["a"]}, "give either", None),
        ({"input": "x"}, "labels: Field required", "labels"),
        ({"input": "x", "labels": []}, "labels: ", "labels"),
        ({"input": "x", "labels": ["a", ""]}, "labels.1: ", "labels"),
        ({"input": "x", "labels": ["a", "b", "a"]}, "two labels are the same", None),
        ({"input": "x", "labels": ["a"] * 200}, "labels: ", "labels"),
        ({"input": "", "labels": ["a"]}, "input: ", "input"),
        ({"input": [], "labels": ["a"]}, "input: ", "input"),
        ({"input": ["x", ""], "labels": ["a"]}, "at most 2048 texts, and no text may be empty", "input"),
        ({"input": ["x"] * 2049, "labels": ["a"]}, "at most 2048 texts, and no text may be empty", "input"),
        ({"input": [1], "labels": ["a"]}, "/v1/embeddings takes tokens", "input"),
        ({"input": "x" * 60, "labels": ["a"]}, "the prompt has 61 tokens with its longest label, at most 60", None),
        ({"input": "x" * 61, "labels": ["a"]}, "the prompt has 61 tokens, at most 60", None),
        ({"input": ["x", "x" * 60], "labels": ["a"]}, "input.1: the prompt has 61 tokens", "input"),
        ({"input": "x", "labels": ["\ud83d"]}, "labels.0: Input should be a valid string", "labels"),
        ({"messages": [{"role": "assistant", "content": "x"}], "labels": ["a"]}, "template refused", "messages"),
        ({"input": "x", "labels": ["a"], "logprobs": 5}, "logprobs: ", "logprobs"),
        ({"input": "x", "labels": ["a"], "temperature": 2}, "'temperature' is not supported", None),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode() if isinstance(value, dict) else "",
)
def test_what_can_not_be_decided_is_a_400(server: Running, body: dict[str, Any], says: str, param: str | None) -> None:
    status, answer = server.post({"model": NAME, **body}, PATH)
    assert status == 400 and says in answer["error"]["message"], answer
    assert answer["error"]["param"] == param and answer["error"]["type"] == "invalid_request_error"


@settings(max_examples=150)
@given(
    texts=st.one_of(TEXT, st.lists(TEXT, max_size=3), VALUE),
    labels=st.lists(TEXT, max_size=4) | VALUE,
    more=st.one_of(st.just({}), st.dictionaries(st.sampled_from(["messages", "user", "n", "x"]), VALUE, max_size=2)),
)
def test_anything_is_decided_or_refused(server: Running, texts: Any, labels: Any, more: dict[str, Any]) -> None:
    """In OpenAI's form, whatever is sent; the shares of all labels are one whole."""
    status, answer = server.post({"model": NAME, "input": texts, "labels": labels, **more}, PATH)
    if status == 200:
        for row in answer["data"]:
            assert math.fsum(one["probability"] for one in row["labels"]) == pytest.approx(1)
            assert all(0 <= one["probability"] <= 1 and one["logprob"] <= 0 for one in row["labels"])
            assert len(row["labels"]) == len(labels)
    else:
        assert status == 400 and {*answer["error"]} == {"message", "type", "param", "code"}
        assert answer["error"]["message"].isprintable()


def test_a_label_that_the_tokenizer_does_not_know_is_a_400() -> None:
    """All unknown characters are the same token, so its probability would say nothing of the label."""
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2, "é": 3}, [], unk_token="<unk>"))
    with running(replace(fake_model(), tokenizer=tokenizer)) as server:
        assert decide(server, input="aéx", labels=["b", "é"])
        status, answer = server.post({"model": NAME, "input": "aéx", "labels": ["b", "bè"]}, PATH)
    assert status == 400 and answer["error"]["param"] == "labels"
    assert answer["error"]["message"] == "labels: 'bè' has a character that is unknown to the tokenizer"


def test_another_model_is_a_404(server: Running) -> None:
    assert server.post({"model": "gpt", "input": "x", "labels": ["a"]}, PATH)[0] == 404


def test_other_requests_run_between_the_texts_of_a_batch() -> None:
    """And a batch that was begun never finds the queue full, though others do."""
    limits, texts = Limits(queue=1), [f"{i} is" for i in range(20)]
    with running(fake_model(Speaker(delay=0.005)), Settings(port=0, limits=limits)) as server:

        def others() -> list[int]:
            found = []
            while not batch.done():
                found.append(server.post(ask(max_tokens=1))[0])
            return found

        with ThreadPoolExecutor(5) as pool:
            batch = pool.submit(decide, server, input=texts, labels=["a", "b"])
            wait_until(lambda: server.metric("shardmill_decisions_total") > 0)
            statuses = [status for asked in [pool.submit(others) for _ in range(4)] for status in asked.result()]
        assert len(batch.result()["data"]) == len(texts)
        assert {*statuses} == {200, 429}


class Noting(Model):
    """Notes what is tokenised, and waits before a text that ends in HELD until it is `free`."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        noted.append(text)
        assert not text.endswith(HELD) or free.wait(PATIENCE), "a test forgot to free the tokenizer"
        return super().encode(text, special=special)


noted, free, HELD = list[str](), threading.Event(), "held"


@pytest.fixture
def noting() -> Model:
    noted.clear()
    free.clear()
    plain = fake_model()
    return Noting(**{field.name: getattr(plain, field.name) for field in fields(plain) if field.init})


@contextmanager
def freed() -> Iterator[None]:
    """Frees the tokenizer, also where a test fails."""
    try:
        yield
    finally:
        free.set()


def test_a_text_is_tokenised_at_its_turn(noting: Model) -> None:
    """When the texts before it are scored, and the later ones are not read yet."""
    with running(noting) as server, ThreadPoolExecutor(1) as pool, freed():
        batch = pool.submit(decide, server, input=["one", HELD, "three"], labels=[" a", " b"])
        wait_until(lambda: HELD in noted)
        assert noted == ["one", "one a", "one b", HELD] and server.metric("shardmill_decisions_total") == 1
        free.set()
        assert len(batch.result()["data"]) == 3


def test_a_full_queue_is_asked_before_a_text_is_tokenised(noting: Model) -> None:
    assert isinstance(noting.engine, Speaker)
    with running(noting, Settings(port=0, limits=Limits(queue=0))) as server, ThreadPoolExecutor(1) as pool:
        noting.engine.hold()
        asked = pool.submit(server.post, ask(prompt="x", max_tokens=1))
        assert noting.engine.reached.wait(PATIENCE)
        status, _ = server.post({"model": NAME, "input": "one", "labels": [" a"]}, PATH)
        noting.engine.free.set()
        assert asked.result()[0] == 200
    assert status == 429 and "one" not in noted


def test_a_client_that_leaves_ends_the_tokenising(noting: Model) -> None:
    """Of the labels that are left, and it has held up no completion."""
    labels = [f" {HELD}", *(f" {i}" for i in range(100))]
    body = json.dumps({"model": NAME, "input": "one", "labels": labels}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    left = 'shardmill_requests_total{endpoint="/v1/decide",status="499"}'
    with running(noting) as server, ThreadPoolExecutor(1) as pool, freed():
        for count in range(1, 8):  # more than there are threads for completions
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_until(lambda: f"one {HELD}" in noted)
            wait_until(lambda n=count: server.metric(left) == n)  # type: ignore[misc]
        asked = pool.submit(server.post, ask(max_tokens=1))
        wait_until(asked.done)
        assert asked.result()[0] == 200
        free.set()
        assert decide(server, input="two", labels=["a"])
    assert "one 0" not in noted


def test_a_client_that_leaves_ends_its_batch() -> None:
    with running(fake_model(Speaker(delay=0.01))) as server:
        body = json.dumps({"model": NAME, "input": [f"{i} is" for i in range(500)], "labels": ["a", "b"]}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: server.metric("shardmill_decisions_total") > 2)
        path = 'shardmill_requests_total{endpoint="/v1/decide",status="499"}'
        wait_until(lambda: server.metric(path) == 1)
        wait_until(lambda: server.metric("shardmill_running") == 0)
        assert server.metric("shardmill_decisions_total") < 100
