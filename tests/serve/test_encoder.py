"""A served encoder: spans over HTTP, embeddings to OpenAI's own client, and what is refused."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import openai
import pytest
import torch
from models import tiny_encoders

from shardmill.machine import is_portable
from shardmill.runtime import label as reading
from shardmill.runtime.label import Reader, as_object
from shardmill.serve.encoder import EncoderWorker, create_encoder_app
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Settings
from shardmill.serve.protocol import ApiError
from shardmill.serve.server import around, bind

from .running import PATIENCE, Running, wait_until

TEXTS = ["Anna Kovalenko lives at 14 Harbour Street.", "🎉 Zoë", "x"]


@contextmanager
def running(reader: Reader) -> Iterator[Running]:
    """A server on a free port; it ends in order when the block does."""
    settings, metrics = Settings(port=0), Metrics()
    desk = EncoderWorker(metrics, settings.limits.queue)
    listener, up = bind(settings), threading.Event()
    app = create_encoder_app(reader, desk, metrics, settings)
    server = around(app, desk, settings, up.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert up.wait(PATIENCE)
    try:
        yield Running(listener.getsockname()[1], desk, server)  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        desk.close(PATIENCE)


def built(folder: Path, task: str) -> Path:
    """A build of a tiny BERT."""
    return encoders.build(tiny_encoders.write_tiny("bert", folder / "ck", task), folder / "build", buckets=[64])


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return reading.load_reader(built(tmp_path_factory.mktemp("labels"), "token-classification"), "fp32")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, Path]:
    folder = built(tmp_path_factory.mktemp("embeds"), "feature-extraction")
    return reading.load_reader(folder, "fp32"), folder


def test_spans_over_http_are_those_of_the_library(labeller: Reader) -> None:
    with running(labeller) as server:
        status, one = server.post({"model": "tiny", "input": TEXTS[0], "redact": True}, "/v1/label")
        _, all_of_them = server.post({"model": "tiny", "input": TEXTS}, "/v1/label")
    expected = [json.loads(json.dumps(as_object(text, reading.label(labeller, text)))) for text in TEXTS]
    assert status == 200 and len(all_of_them["data"]) == len(TEXTS)
    for row, alone in zip(all_of_them["data"], expected, strict=True):  # their texts shared a pass
        scores = [{**span, "score": pytest.approx(span["score"], abs=1e-5)} for span in alone["spans"]]
        assert row["spans"] == scores
    assert one["data"][0]["redacted"] == reading.redacted(TEXTS[0], reading.label(labeller, TEXTS[0]).spans)
    assert all_of_them["usage"]["total_tokens"] == sum(row["tokens"] for row in expected)


@pytest.mark.parametrize("form", [openai.omit, "float", "base64"])
def test_openais_client_gets_transformers_embeddings(embedder: tuple[Reader, Path], form: Any) -> None:
    """The mean of transformers' hidden states, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    reader, folder = embedder
    model = AutoModel.from_pretrained(folder / "source", dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "source")
    with running(reader) as server:
        answer = server.client().embeddings.create(model="tiny", input=TEXTS, encoding_format=form)
        tokens = server.client().embeddings.create(model="tiny", input=tokenizer(TEXTS[0]).input_ids)
    first, rounding = np.zeros(0), 1e-4 if is_portable() else 1e-3  # Core ML computes in fp16
    for text, row in zip(TEXTS, answer.data, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = (hidden / hidden.norm()).numpy()
        given: Any = row.embedding  # which the client leaves as it is where it is asked for base64
        found = np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else np.asarray(given)
        assert np.abs(found - expected).max() < rounding
        first = expected if text == TEXTS[0] else first
    assert np.abs(np.asarray(tokens.data[0].embedding) - first).max() < rounding
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in TEXTS)


def test_requests_are_counted_by_their_address(labeller: Reader, embedder: tuple[Reader, Path]) -> None:
    for reader, path in ((labeller, "/v1/label"), (embedder[0], "/v1/embeddings")):
        with running(reader) as server:
            server.post({"model": "tiny", "input": "x"}, path)
            assert server.metric(f'shardmill_requests_total{{endpoint="{path}",status="200"}}') == 1


REFUSED = {
    "another model": ("/v1/label", {"model": "other", "input": "x"}, 404, "is not served here"),
    "embeddings of a labeller": ("/v1/embeddings", {"model": "tiny", "input": "x"}, 400, "ask /v1/label"),
    "no text": ("/v1/label", {"model": "tiny"}, 400, "input"),
    "an unknown field": ("/v1/label", {"model": "tiny", "input": "x", "stride": 3}, 400, "'stride' is not supported"),
    "half a pair": ("/v1/label", {"model": "tiny", "input": "\ud800"}, 400, "surrogate"),
    "a chat": ("/v1/chat/completions", {"model": "tiny", "messages": []}, 404, "there is no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_answered_is_refused_in_one_line(labeller: Reader, name: str) -> None:
    path, body, status, message = REFUSED[name]
    with running(labeller) as server:
        got, content = server.post(body, path)
    assert got == status and message in content["error"]["message"] and "\n" not in content["error"]["message"]


def test_a_text_without_spans_is_not_redacted(tmp_path: Path) -> None:
    with running(reading.load_reader(built(tmp_path, "text-classification"), "fp32")) as server:
        got, content = server.post({"model": "tiny", "input": "Anna", "redact": True}, "/v1/label")
        assert got == 400 and "leave out redact" in content["error"]["message"]
        assert server.post({"model": "tiny", "input": "Anna"}, "/v1/label")[0] == 200


def test_too_long_a_text_is_refused_for_embeddings(embedder: tuple[Reader, Path]) -> None:
    with running(embedder[0]) as server, pytest.raises(openai.BadRequestError, match="1 to 64"):
        server.client().embeddings.create(model="tiny", input="word " * 200)


@contextmanager
def slow(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Each pass takes a while; what is yielded has an item for each that has begun."""
    passes: list[None] = []
    quick = reader.encoder.run_together

    def run(texts: Any) -> Any:
        passes.append(None)
        time.sleep(0.05)
        return quick(texts)

    with monkeypatch.context() as patched:
        patched.setattr(reader.encoder, "run_together", run)
        yield passes


@pytest.mark.parametrize("texts", ["word " * 10_000, ["word " * 60] * 600], ids=["one long text", "many texts"])
def test_a_client_that_leaves_frees_the_engine(
    labeller: Reader, texts: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends after the pass that runs, of hundreds; so does one that still waits."""
    with running(labeller) as server, slow(labeller, monkeypatch) as passes:
        body = json.dumps({"model": "tiny", "input": texts})
        leaving = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE) for _ in range(2)]
        for connection in leaving:
            connection.request("POST", "/v1/label", body, {"Content-Type": "application/json"})
        wait_until(lambda: len(passes) > 1)
        for connection in leaving:
            connection.close()
        wait_until(lambda: server.metric('shardmill_requests_total{endpoint="/v1/label",status="499"}') == 2)
        seen = len(passes)
        assert server.post({"model": "tiny", "input": "x"}, "/v1/label")[0] == 200
        assert len(passes) <= seen + 2


def test_a_text_that_a_shutdown_ends_is_no_fault_of_the_client(
    labeller: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(labeller) as server, slow(labeller, monkeypatch) as passes, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, {"model": "tiny", "input": "word " * 10_000}, "/v1/label")
        wait_until(lambda: len(passes) > 1)
        server.worker.cancel_running()
        assert answer.result(PATIENCE)[0] == 503


def test_a_text_of_many_passes_ends_at_shutdown_after_the_pass_that_runs(labeller: Reader) -> None:
    desk, passes = EncoderWorker(Metrics(), 1), 0

    def count() -> None:
        nonlocal passes
        desk.check()
        passes += 1
        if passes == 2:
            desk.cancel_running()

    with pytest.raises(ApiError, match="shut"):
        reading.label(replace(labeller, before_pass=count), "word " * 500)
    assert passes == 2
