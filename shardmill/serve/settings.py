"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardmill.decode import ContextPolicy


@dataclass(frozen=True)
class Limits:
    """Limits on requests and connections.

    Attributes:
        queue: requests that wait while one runs; one more is answered 429.
        open_requests: requests accepted and not yet answered completely, in any state; one more is answered 429.
        prompt_tokens, max_tokens: per request; None: the size of the context, even if it slides.
        body_bytes: longest request body.
        body_seconds: time that a client has to send the body.
        head_seconds: time that a connection has to send the head of a request, from its beginning or the last answer.
        idle_connections: connections that may wait for a request; one more closes the oldest.
        stall_seconds: time after which a stream is closed whose client reads nothing.
        keepalive_seconds: time without data after which a stream sends a comment.
        grace_seconds: time that the running request has to finish when the server shuts down.
    """

    queue: int = 64
    open_requests: int = 256
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    head_seconds: float = 10.0
    idle_connections: int = 256
    stall_seconds: float = 60.0
    keepalive_seconds: float = 10.0
    grace_seconds: float = 10.0


@dataclass(frozen=True)
class Settings:
    """Address and access of the server, and defaults of requests.

    Attributes:
        host: the address of the server.
        port: 0 lets the system choose one.
        allowed_hosts: names to accept in a request's `Host` besides this machine's, for example a proxy's, if `host`
            is a loopback address.
        api_key: clients must send it as `Authorization: Bearer KEY`; None: no key is needed.
        drafter: the drafter of requests that name none.
        policy: the draft policy, by name.
        draft_table: file that the drafter `learned` starts with, if it exists, and that is saved at the end.
        guard_margin: for engines whose rows differ in their last bits with the width of a pass: rows whose two best
            logits are closer than this run again alone; 0: none.
        context_policy: what happens when the context is full: stop, or slide on.
        limits: limits on requests and connections.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    api_key: str | None = None
    drafter: str = "ngram"
    policy: str = "cost_model"
    draft_table: Path | None = None
    guard_margin: float = 0.0
    context_policy: ContextPolicy = "stop"
    limits: Limits = field(default_factory=Limits)
