"""A served encoder: spans over HTTP, embeddings to OpenAI's own client, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import encoders
import limits
import numpy as np
import openai
import pytest
import torch
from models import tiny_encoders
from patience import PATIENCE, wait_until
from torch import nn

from shardmill.errors import ProgramError
from shardmill.machine import is_portable
from shardmill.runtime import label as reading
from shardmill.runtime.label import Reader, as_object
from shardmill.serve.encoder import EncoderWorker, create_encoder_app
from shardmill.serve.listening import bind
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Settings
from shardmill.serve.protocol import ApiError
from shardmill.serve.server import around

from .running import Running

TEXTS = ["Anna Kovalenko lives at 14 Harbour Street.", "🎉 Zoë", "x"]
# Three layers. Core ML computes in fp16, and sums in a wider format.
MODEL = limits.model(3, 128) if is_portable() else limits.model(3, 1, "fp16")
GAINS = limits.roundings("fp16", 3) if is_portable() else limits.model(3, 1, "fp16")  # gains are rounded to fp16
SCORES = limits.logprobs(MODEL, 2, len(tiny_encoders.LABELS))


@contextmanager
def running(reader: Reader) -> Iterator[Running]:
    """A server on a free port; it ends in order when the block does."""
    settings, metrics = Settings(port=0), Metrics()
    desk = EncoderWorker(metrics, settings.limits.queue)
    listener, up = bind(settings.host, settings.port), threading.Event()
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
        found, scores = ([span.pop("score") for span in one["spans"]] for one in (row, alone))
        assert row["spans"] == alone["spans"]
        if scores:
            limits.numbers_agree("scores", found, scores, SCORES, size=1)
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
    first = np.zeros(0)
    for text, row in zip(TEXTS, answer.data, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = (hidden / hidden.norm()).numpy()
        given: Any = row.embedding  # which the client leaves as it is where it is asked for base64
        found = np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else np.asarray(given)
        limits.rows_agree(text, found, expected, MODEL)
        first = expected if text == TEXTS[0] else first
    limits.rows_agree("of tokens", tokens.data[0].embedding, first, MODEL)
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in TEXTS)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, Path, Sequence[nn.Linear]]:
    """A tiny EmbeddingGemma: the mean of its rows goes through two projections."""
    folder = tmp_path_factory.mktemp("gemma")
    checkpoint = tiny_encoders.write_tiny("gemma3_text", folder / "ck")
    torch.manual_seed(0)
    dense = tiny_encoders.write_modules(
        checkpoint, "mean", [nn.Linear(96, 64), nn.Linear(64, 48, bias=False)], default_prompt_name="document"
    )
    return reading.load_reader(encoders.build(checkpoint, folder / "build", buckets=[64]), "fp32"), checkpoint, dense


@pytest.mark.thorough
def test_dimensions_are_those_of_transformers_that_come_first(
    gemma: tuple[Reader, Path, Sequence[nn.Linear]], embedder: tuple[Reader, Path]
) -> None:
    """Truncated after the projections, and only then of length 1, as sentence-transformers has it."""
    from transformers import AutoModel, AutoTokenizer

    reader, checkpoint, (first, second) = gemma
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(tiny_encoders.PROMPTS["document"] + TEXTS[1], return_tensors="pt")
    with running(reader) as server:
        ask = partial(server.client().embeddings.create, model="tiny", input=TEXTS[1], encoding_format="float")
        (row,), (whole,) = ask(dimensions=16).data, ask(dimensions=48).data
        with pytest.raises(openai.BadRequestError, match="dimensions: tiny gives 48 numbers, 49 are asked"):
            ask(dimensions=49)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            ask(dimensions=0)
    with torch.no_grad():
        kept = second(torch.tanh(first(model(**ids).last_hidden_state[0].mean(0))))[:16]
    limits.rows_agree("the first 16 numbers", row.embedding, kept / kept.norm(), GAINS)
    assert len(whole.embedding) == 48 and embedder[0].width == 64


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["query", None])
def test_prompts_and_projections_are_the_checkpoints(
    gemma: tuple[Reader, Path, Sequence[nn.Linear]], name: str | None
) -> None:
    """A request that names no prompt gets the checkpoint's default."""
    from transformers import AutoModel, AutoTokenizer

    reader, checkpoint, (first, second) = gemma
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with running(reader) as server:
        extra = {"extra_body": {"prompt_name": name}} if name else {}
        answer = server.client().embeddings.create(model="tiny", input=TEXTS[1:], encoding_format="float", **extra)
    for text, row in zip(TEXTS[1:], answer.data, strict=True):
        ids = tokenizer(tiny_encoders.PROMPTS[name or "document"] + text, return_tensors="pt")
        with torch.no_grad():
            found = second(torch.tanh(first(model(**ids).last_hidden_state[0].mean(0))))
        expected = (found / found.norm()).numpy()
        limits.rows_agree(text, row.embedding, expected, GAINS)


@pytest.mark.thorough
def test_an_embedding_may_be_projected_token_by_token(tmp_path: Path) -> None:
    """In the program of an EmbeddingGemma 2: the mean of its states is wider than the model."""
    from transformers import AutoModel, AutoTokenizer

    checkpoint = tiny_encoders.write_tiny("embedding_gemma2", tmp_path / "ck")
    tiny_encoders.write_modules(checkpoint, "mean", default_prompt_name="document")
    reader = reading.load_reader(encoders.build(checkpoint, tmp_path / "build", buckets=[64]), "fp32")
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with running(reader) as server:
        ask = partial(server.client().embeddings.create, model="tiny", input=TEXTS, encoding_format="float")
        found = {size: ask(dimensions=size).data for size in (16, 72)}
        with pytest.raises(openai.BadRequestError, match="dimensions: tiny gives 72 numbers, 73 are asked"):
            ask(dimensions=73)
    for place, text in enumerate(TEXTS):
        ids = tokenizer(tiny_encoders.PROMPTS["document"] + text, return_tensors="pt")
        with torch.no_grad():
            whole = model(**ids).last_hidden_state[0].mean(0)
        for size, rows in found.items():
            expected = (whole[:size] / whole[:size].norm()).numpy()
            limits.rows_agree(f"{size} numbers of {text!r}", rows[place].embedding, expected, MODEL)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, Path]:
    """A tiny Qwen3-Reranker, which answers "n" or "y"."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = tiny_encoders.write_tiny("qwen3", folder / "ck", "text-ranking", max_position_embeddings=512)
    build = encoders.build(checkpoint, folder / "build", buckets=[512], answers=["n", "y"])
    return reading.load_reader(build, "fp32"), checkpoint


DOCUMENTS: list[Any] = ["Bern is in Switzerland.", {"text": "Beijing."}, "x", "A llama has soft feet."]
QUESTION = (  # as the model card of Qwen/Qwen3-Reranker-0.6B asks it
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: %s\n<Query>: %s\n<Document>: %s<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@pytest.mark.parametrize("instruction", [None, "Find capitals"])
def test_scores_are_transformers_probabilities_of_the_last_answer(
    ranker: tuple[Reader, Path], instruction: str | None
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader, checkpoint = ranker
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers, scores, count = tokenizer.convert_tokens_to_ids(["n", "y"]), [], 0
    for one in DOCUMENTS:
        text = one if isinstance(one, str) else one["text"]
        task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
        ids = tokenizer(QUESTION % (task, "capital", text), add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits[0, -1, answers].softmax(0)[1]))
        count += ids.shape[1]
    body = {"model": "tiny", "query": "capital", "documents": DOCUMENTS}
    with running(reader) as server:
        status, answer = server.post(body | ({"instruction": instruction} if instruction else {}), "/v1/rerank")
        _, best = server.post(body | {"top_n": 1, "return_documents": False}, "/v1/rerank")
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    assert status == 200 and [row["index"] for row in answer["results"]] == order
    relevances = [row["relevance_score"] for row in answer["results"]]
    limits.numbers_agree("relevance", relevances, [scores[i] for i in order], SCORES, size=1)
    assert answer["results"][order.index(1)]["document"] == {"text": "Beijing."}
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count} and answer["id"].startswith("rerank-")
    assert (
        answer["model"] == "tiny"
        and len(best["results"]) == 1
        and best["results"][0].keys()
        == {
            "index",
            "relevance_score",
        }
    )


UNRANKED = {
    "embeddings of a ranker": ("/v1/embeddings", {"model": "tiny", "input": "x"}, "ranks documents: ask /v1/rerank"),
    "no document": ("/v1/rerank", {"model": "tiny", "query": "q", "documents": []}, "documents"),
    "no query": ("/v1/rerank", {"model": "tiny", "documents": ["x"]}, "query"),
    "an unknown field": (
        "/v1/rerank",
        {"model": "tiny", "query": "q", "documents": ["x"], "max_tokens_per_doc": 5},
        "'max_tokens_per_doc' is not supported",
    ),
    "too long a document": (
        "/v1/rerank",
        {"model": "tiny", "query": "q", "documents": ["x", "word " * 400]},
        "query and document have",
    ),
    "half a pair": ("/v1/rerank", {"model": "tiny", "query": "q", "documents": ["\ud800"]}, "unicode string"),
}


@pytest.mark.parametrize("name", UNRANKED)
def test_what_can_not_be_ranked_is_refused_in_one_line(ranker: tuple[Reader, Path], name: str) -> None:
    path, body, message = UNRANKED[name]
    with running(ranker[0]) as server:
        got, content = server.post(body, path)
    assert got == 400 and message in content["error"]["message"] and "\n" not in content["error"]["message"]


def test_a_prompt_that_a_model_lacks_is_refused(
    gemma: tuple[Reader, Path, Sequence[nn.Linear]], embedder: tuple[Reader, Path]
) -> None:
    for reader, has in ((gemma[0], "document, query"), (embedder[0], "none")):
        with running(reader) as server:
            body = {"model": "tiny", "input": "x", "prompt_name": "passage"}
            got, content = server.post(body, "/v1/embeddings")
        assert got == 400 and content["error"]["message"].endswith(f"no prompt 'passage'; it has {has}")


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
    "ranks of a labeller": ("/v1/rerank", {"model": "tiny", "query": "q", "documents": ["x"]}, 400, "ask /v1/label"),
    "a chat": ("/v1/chat/completions", {"model": "tiny", "messages": []}, 404, "there is no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_answered_is_refused_in_one_line(labeller: Reader, name: str) -> None:
    path, body, status, message = REFUSED[name]
    with running(labeller) as server:
        got, content = server.post(body, path)
    assert got == status and message in content["error"]["message"] and "\n" not in content["error"]["message"]


@pytest.mark.thorough
def test_a_text_without_spans_is_not_redacted(tmp_path: Path) -> None:
    with running(reading.load_reader(built(tmp_path, "text-classification"), "fp32")) as server:
        got, content = server.post({"model": "tiny", "input": "Anna", "redact": True}, "/v1/label")
        assert got == 400 and "leave out redact" in content["error"]["message"]
        assert server.post({"model": "tiny", "input": "Anna"}, "/v1/label")[0] == 200


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_the_server_s_fault(
    labeller: Reader, number: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Never the first label, and no fault of the client. One number of one row is enough."""
    real = labeller.encoder.run_together

    def spoilt(texts: Any) -> Any:
        found = [rows.copy() for rows in real(texts)]
        found[-1][-1, 0] = number
        return found

    with running(labeller) as server, monkeypatch.context() as patched:
        patched.setattr(labeller.encoder, "run_together", spoilt)
        with pytest.raises(ProgramError, match="tiny has computed a number that is not finite"):
            reading.label(labeller, TEXTS[0])
        status, content = server.post({"model": "tiny", "input": TEXTS}, "/v1/label")
        assert status == 500 and content["error"]["type"] == "server_error"
        assert "not finite" in caplog.text
        patched.undo()
        assert server.post({"model": "tiny", "input": TEXTS}, "/v1/label")[0] == 200


def test_too_long_a_text_is_refused_for_embeddings(embedder: tuple[Reader, Path]) -> None:
    with running(embedder[0]) as server, pytest.raises(openai.BadRequestError, match="1 to 64"):
        server.client().embeddings.create(model="tiny", input="word " * 200)


@contextmanager
def held(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[None], threading.Event]]:
    """The second pass and later ones wait for the event; the list has an item for each pass that has begun."""
    passes: list[None] = []
    free = threading.Event()
    quick = reader.encoder.run_together

    def run(texts: Any) -> Any:
        passes.append(None)
        assert len(passes) == 1 or free.wait(PATIENCE), "a test forgot to free the engine"
        return quick(texts)

    with monkeypatch.context() as patched:
        patched.setattr(reader.encoder, "run_together", run)
        try:
            yield passes, free
        finally:
            free.set()


@pytest.mark.parametrize("texts", ["word " * 10_000, ["word " * 60] * 600], ids=["one long text", "many texts"])
def test_a_client_that_leaves_frees_the_engine(
    labeller: Reader, texts: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends after the pass that runs, of hundreds; so does one that still waits."""
    with running(labeller) as server, held(labeller, monkeypatch) as (passes, free):
        body = json.dumps({"model": "tiny", "input": texts})
        leaving = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE) for _ in range(2)]
        for connection in leaving:
            connection.request("POST", "/v1/label", body, {"Content-Type": "application/json"})
        wait_until(lambda: len(passes) > 1)
        for connection in leaving:
            connection.close()
        wait_until(lambda: server.metric('shardmill_requests_total{endpoint="/v1/label",status="499"}') == 2)
        free.set()
        assert server.post({"model": "tiny", "input": "x"}, "/v1/label")[0] == 200
        assert len(passes) == 3


def test_a_text_that_a_shutdown_ends_is_no_fault_of_the_client(
    labeller: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running(labeller) as server,
        ThreadPoolExecutor(1) as pool,
        held(labeller, monkeypatch) as (passes, free),
    ):
        answer = pool.submit(server.post, {"model": "tiny", "input": "word " * 10_000}, "/v1/label")
        wait_until(lambda: len(passes) > 1)
        server.worker.cancel_running()
        free.set()
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
    desk.close(PATIENCE)


def test_an_engine_that_hangs_does_not_keep_the_process() -> None:
    """Closing waits no longer than it is told, and the thread ends with the process."""
    desk, reached, free = EncoderWorker(Metrics(), 1), threading.Event(), threading.Event()

    async def ask() -> None:
        taken = asyncio.ensure_future(desk.take(lambda: reached.set() or free.wait(PATIENCE)))
        await asyncio.to_thread(reached.wait, PATIENCE)
        closing = threading.Thread(target=desk.close, args=(0.0,))
        closing.start()
        await asyncio.to_thread(closing.join, PATIENCE / 2)  # at once, if it works
        hangs = closing.is_alive()
        free.set()
        assert await taken and not hangs

    asyncio.run(ask())
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("reader"))
