"""What a client may not do: each refusal has OpenAI's form, a fitting status, and one line that says what to change."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from patience import PATIENCE

from shardmill.serve.http import is_loopback, may_be_asked_for
from shardmill.serve.model import Limits, Settings

from .fake import NAME, Broken, fake_model
from .running import Running, ask, running

KEY = "s3cret-é"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(max_tokens=100, prompt_tokens=200, body_bytes=20_000)
    with running(fake_model(Broken()), Settings(port=0, limits=limits)) as up:
        yield up


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(fake_model(), Settings(port=0, api_key=KEY)) as up:
        yield up


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "says", "param"),
    [
        ({"n": 17}, "n: ", "n"),
        ({"best_of": 3, "n": 2}, "best_of: must be as large as n", "best_of"),
        ({"echo": "yes please"}, "echo: ", "echo"),
        ({"temperature": -1}, "temperature: ", "temperature"),
        ({"temperature": "hot"}, "temperature: ", "temperature"),
        ({"top_p": 0}, "top_p: ", "top_p"),
        ({"max_tokens": -1}, "max_tokens: ", "max_tokens"),
        ({"max_tokens": 101}, "max_tokens is 101, at most 100", "max_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty: ", "presence_penalty"),
        ({"stop": ["a"] * 17}, "stop: must be a text of 1 to 256 characters or a list of at most 16", "stop"),
        ({"stop": ""}, "stop: must be a text of 1 to 256", "stop"),
        ({"stop": ["a", ""]}, "stop: must be a text of 1 to 256", "stop"),
        ({"repetition_penalty": 1e-320, "temperature": 1}, "repetition_penalty: ", "repetition_penalty"),
        ({"repetition_penalty": 11}, "repetition_penalty: ", "repetition_penalty"),
        ({"logprobs": 21}, "logprobs: ", "logprobs"),
        ({"logit_bias": {"999": 1}}, "logit_bias names token 999", None),
        ({"tools": [{"type": "function"}]}, "'tools' is not supported", None),
        ({"no_such_field": 1}, "'no_such_field' is not supported", None),
        ({"\ud800": 1}, "valid string", None),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": []}, "the prompt is empty", "prompt"),
        (
            {"prompt": ["a", [1]]},
            "prompt: must be a text, a list of tokens, or a list of 1 to 32 such",
            "prompt",
        ),
        ({"prompt": ["a"] * 33}, "prompt: must be a text, a list of tokens, or a list of 1 to 32 such", "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1: the prompt is empty", "prompt"),
        ({"prompt": [[1], [2, 70000]]}, "prompt.1: the prompt holds a token outside", "prompt"),
        ({"prompt": [70000]}, "outside the vocabulary of 257", "prompt"),
        ({"prompt": "\ud83d"}, "not valid Unicode", None),
        (
            {"prompt": "x" * 201},
            "the prompt has 201 tokens, at most 200 are allowed (this model's maximum context length",
            "prompt",
        ),
        ({"prompt": None}, "prompt", "prompt"),
        ({"shardmill": {"drafter": "magic"}}, "shardmill.drafter: ", "shardmill"),
        ({"shardmill": {"drafter": "draft_model"}}, "--draft-build", "shardmill.drafter"),
        ({"shardmill": {"colour": "red"}}, "'colour' is not supported", "shardmill"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode() if isinstance(value, dict) else "",
)
def test_a_request_that_cannot_be_honoured_is_named(
    server: Running, change: dict[str, Any], says: str, param: str | None, stream: bool
) -> None:
    """400 with a line that begins with, or names, what is wrong, before a stream begins."""
    status, answer = server.post(ask(**change, stream=stream))
    assert status == 400, answer
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] == param


def test_empty_and_idle_fields_are_no_reason_to_refuse(server: Running) -> None:
    """What clients send by habit."""
    idle = {"user": "u", "metadata": {"a": "b"}, "tools": [], "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0,
            "stop": None, "echo": False, "store": False, "logit_bias": None}  # fmt: skip
    status, answer = server.post(ask(**idle))
    assert status == 200, answer
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "verbosity": "low"}
    status, answer = server.post({**chat, "modalities": ["text"], "top_logprobs": 0}, "/v1/chat/completions")
    assert status == 200, answer


@pytest.mark.parametrize(
    "change", [{"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}, {"modalities": ["audio"]}]
)
def test_a_chat_field_that_would_be_overlooked_is_named(server: Running, change: dict[str, Any]) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], **change}
    status, answer = server.post(body, "/v1/chat/completions")
    assert status == 400 and next(iter(change)) in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"null", b"[" * 5000, b'{"model": NaN}'],
    ids=["nothing", "half", "list", "string", "no-utf8", "null", "deep", "nan"],
)
def test_a_body_that_is_no_request_is_a_400(server: Running, body: bytes) -> None:
    """Never a 500, and the server goes on."""
    status, answer = server.post(body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_only_json_is_read(server: Running) -> None:
    """A form that a web page can send to another site's server does nothing."""
    status, _, _ = server.request(
        "POST", "/v1/completions", b'{"model": "fake", "prompt": "x"}', {"Content-Type": "text/plain"}
    )
    assert status == 400


def test_other_addresses_and_methods(server: Running) -> None:
    """404 and 405, in the same form."""
    assert server.post({}, "/v1/embeddings")[0] == 404
    status, _, body = server.request("GET", "/v1/completions")
    assert status == 405 and b"does not take GET" in body
    assert server.request("GET", "/v1/models/")[::2] == server.request("GET", "/v1/models")[::2]
    for page in ("/health", "/metrics", "/v1/models", "/v1/models/fake"):
        assert server.request("HEAD", page)[::2] == (200, b"")  # what can be fetched can be asked for by HEAD
    assert server.request("HEAD", "/v1/models/gpt-4")[::2] == (404, b"")


def test_another_model_is_not_served_here(server: Running) -> None:
    """404 names the one that is; the list has just that."""
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; 'fake' is"):
        server.client().completions.create(**ask(model="gpt-4"))
    assert [model.id for model in server.client().models.list()] == [NAME]
    assert server.client().models.retrieve(NAME).owned_by == "shardmill"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-4")


def test_too_long_a_body_is_refused_unread(server: Running) -> None:
    """413, whether its length is announced or not."""
    assert server.post(ask(user="x" * 30_000))[0] == 413
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 10
    assert raw(server, request + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    """408 after the limit."""
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with running(fake_model(), Settings(port=0, limits=Limits(body_seconds=0.1))) as up:
        assert raw(up, request).startswith(b"HTTP/1.1 408")


def test_a_failing_engine_is_a_500_and_the_next_request_is_answered(server: Running) -> None:
    """The message tells nothing of the inside; the session starts afresh."""
    before = server.client().completions.create(**ask()).choices[0].text
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().completions.create(**ask(prompt="~x"))
    assert "fire" not in str(caught.value)
    assert server.client().completions.create(**ask()).choices[0].text == before
    stream = server.client().completions.create(**ask(prompt="~x"), stream=True)
    with pytest.raises(openai.APIError, match="the server failed to answer") as told:
        list(stream)
    assert not isinstance(told.value, openai.APIStatusError)  # the status has left before
    assert server.client().completions.create(**ask()).choices[0].text == before


@pytest.mark.parametrize("key", ["wrong", "", KEY + "x", KEY[:-1]])
def test_a_wrong_key_opens_nothing(locked: Running, key: str) -> None:
    """401 for all but /health, which load balancers ask without one."""
    headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
    for path in ("/v1/models", "/metrics", "/no-such-page"):
        assert locked.request("GET", path, headers=headers)[0] == 401
    assert locked.post(ask(), **headers)[0] == 401
    assert locked.request("GET", "/v1/models")[0] == 401
    assert locked.request("GET", "/health")[0] == 200


def test_the_right_key_opens(locked: Running) -> None:
    """And OpenAI's client raises its own error for a wrong one."""
    headers = {"Authorization": f"bearer {KEY}".encode().decode("latin-1")}
    assert locked.request("GET", "/v1/models", headers=headers)[0] == 200
    with pytest.raises(openai.AuthenticationError):
        locked.client("wrong").models.list()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.1", 403),
        ("localhost:80", 200),
        ("LOCALHOST", 200),
        ("127.0.0.2:80", 200),
        ("[::1]:1", 200),
        ("[0:0:0:0:0:0:0:1]", 200),
    ],
)
def test_a_loopback_server_has_loopback_names_only(server: Running, host: str, status: int) -> None:
    """A web page whose name resolves to 127.0.0.1 can't use it (DNS rebinding)."""
    assert server.request("GET", "/health", headers={"Host": host})[0] == status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "LOCALHOST", "::1", "0:0:0:0:0:0:0:1", "127.1",
                                  "::ffff:127.0.0.1"])  # fmt: skip
def test_a_loopback_address_is_one_however_it_is_written(host: str) -> None:
    """By any spelling the Host check applies, and no warning is needed."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "no.such.host.invalid", "", "127.0.0.1.invalid"])
def test_other_addresses_are_none(host: str) -> None:
    assert not is_loopback(host)


def test_a_server_behind_a_proxy_has_the_allowed_names_too() -> None:
    """As a proxy with TLS passes them on, and no others; the refusal names the option, not one that opens the port."""
    settings = Settings(port=0, allowed_hosts=("llm.example", "LLM2.example"))
    with running(fake_model(), settings) as up:
        for host in ("llm.example", "LLM.example:443", "llm2.example", "localhost"):
            assert up.post(ask(), Host=host)[0] == 200
        status, answer = up.post(ask(), Host="evil.llm.example:443")
    message = answer["error"]["message"]
    assert status == 403 and "--host" not in message and message.endswith("--allowed-host evil.llm.example")


def test_a_server_may_be_asked_for_by_the_name_it_was_given() -> None:
    """Debian lets a machine's own name mean 127.0.1.1."""
    assert may_be_asked_for("MyHost:8000", "myhost")
    assert not may_be_asked_for("evil.example", "myhost")


def raw(server: Running, request: bytes) -> bytes:
    """The first bytes of what comes back for bytes on a socket."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(request)
        return connection.recv(4096)
