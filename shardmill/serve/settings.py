"""The decisions of the person who starts a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardmill.decode import ContextPolicy


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients may ask for and on what they may hold.

    Attributes:
        queue: requests that wait while one runs; one more is answered 429.
        open_requests: requests accepted and not yet delivered, whatever they wait for; one more is answered 429.
        prompt_tokens, max_tokens: per request; None: as many as the context holds, also where it slides.
        body_bytes: longest request body. body_seconds: time that a client has to send it.
        head_seconds: time that a connection has to send the head of a request, from its beginning or the last answer.
        idle_connections: connections that may wait for a request; one more closes the one that waits longest.
        stall_seconds: time after which a reader who takes nothing of a stream is given up.
        keepalive_seconds: time without data after which a stream sends a comment.
        grace_seconds: time that the running request has to finish once the server shuts down.
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
    """Where the server listens, who may use it, and what a request gets that asks for nothing special.

    Attributes:
        port: 0 lets the system choose one.
        allowed_hosts: names to accept in a request's `Host` beside this machine's, for example a proxy's, if `host`
            is a loopback address.
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        drafter: used by requests that name none. policy: how much is drafted.
        draft_table: file that the drafter `learned` begins with, if there is one, and is saved to at the end.
        guard_margin: for engines whose rows differ in their last bits with the width of a pass: rows whose two best
            logits are less than this apart are run again alone; 0: none.
        context_policy: what happens once the context is full: stop, or slide on.
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
