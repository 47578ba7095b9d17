"""`shardmill serve`: a built model behind OpenAI's HTTP interface."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardmill.commands.arguments import (
    DRAFTERS,
    Build,
    ContextOption,
    DraftBuild,
    PolicyName,
    Precision,
    TemplateFile,
    Ungated,
    check_draft_build,
    check_drafter,
    check_head,
    check_policy,
    opened,
)
from shardmill.commands.check import NoCheck, check_once
from shardmill.errors import ShardmillError
from shardmill.files import read_text
from shardmill.runtime.manifest import ENCODER, RUNTIME, holds_encoder, open_gates, read_manifest, takes_media
from shardmill.serve.listening import UNIX, host_of, is_loopback, listening

if TYPE_CHECKING:
    from drafted_decoding import ContextPolicy

    from shardmill.runtime.label import Reader
    from shardmill.serve.model import Model

LIMIT = "default: as many tokens as the context holds"
LONGEST_GRACE = 3600.0  # seconds
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
GENERATING = (  # options for a model that generates text
    "drafter", "draft_build", "policy", "draft_table", "context_policy", "chat_template", "prefix_cache_bytes",
    "system_prompt", "max_prompt_tokens", "max_tokens", "guard_margin",
)  # fmt: skip


Host = Annotated[str, typer.Option(help="Address to listen on.")]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="Host name in requests from a proxy on this machine; repeat the option for several names.",
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origin",
        metavar="URL",
        help="Origin of web pages that may ask from a browser, such as http://localhost:3000; repeat it for several.",
    ),
]
SocketFile = Annotated[
    Path | None,
    typer.Option("--socket", help="Listen on this file, a socket of this user's alone, in place of an address."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="SHARDMILL_API_KEY", help="Key that clients must send; safer in the variable than on the command line."
    ),
]
DefaultDrafter = Annotated[str, typer.Option(help=f"Drafter for requests that name none: {DRAFTERS}.")]
DraftTable = Annotated[
    Path | None,
    typer.Option(
        help="File in which the drafter `learned` keeps its table from run to run; written at the end. "
        "It holds token sequences of the requests."
    ),
]
PrefixCacheBytes = Annotated[
    int, typer.Option(min=0, help="Memory for the prefixes of earlier prompts, so that conversations may take turns.")
]
SystemPrompt = Annotated[
    Path | None,
    typer.Option(help="File with the system prompt of many requests: it is kept from the start, and for later starts."),
]
Queue = Annotated[int, typer.Option(min=0, help="Requests that may wait; more are answered 429.")]
LongestPrompt = Annotated[int | None, typer.Option(min=1, help=f"Longest prompt; {LIMIT}.")]
LongestAnswer = Annotated[int | None, typer.Option(min=1, help=f"Longest answer; {LIMIT}.")]
PLAIN_BODY, PICTURED_BODY = 1 << 20, 16 << 20  # bytes
LongestBody = Annotated[
    int | None,
    typer.Option(min=1, help="Longest request body; by default 1 MiB, or 16 MiB with images or sounds."),
]
Grace = Annotated[
    float,
    typer.Option(min=0, max=LONGEST_GRACE, help="Seconds that the running request has left at shutdown."),
]
LogLevel = Annotated[
    Literal["info", "warning", "error"],
    typer.Option(help="How much goes to standard error. info has a line for each request, and no texts."),
]
Warm = Annotated[
    bool, typer.Option("--warm", help="Listen at once, while programs are still loading; /health reports the progress.")
]
GuardMargin = Annotated[
    float,
    typer.Option(min=0, help="Run a token again alone if its two best logits in a wide pass are closer."),
]


def serve(
    context: typer.Context,
    build: Build,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    socket_file: SocketFile = None,
    allowed_hosts: AllowedHosts = None,
    allowed_origins: AllowedOrigins = None,
    api_key: ApiKey = None,
    drafter: DefaultDrafter = "ngram",
    draft_build: DraftBuild = None,
    policy: PolicyName = "cost_model",
    draft_table: DraftTable = None,
    context_policy: ContextOption = "stop",
    chat_template: TemplateFile = None,
    prefix_cache_bytes: PrefixCacheBytes = 1 << 30,
    system_prompt: SystemPrompt = None,
    queue: Queue = 64,
    max_prompt_tokens: LongestPrompt = None,
    max_tokens: LongestAnswer = None,
    max_body_bytes: LongestBody = None,
    grace_seconds: Grace = 10.0,
    precision: Precision = "fp32",
    log_level: LogLevel = "warning",
    warm: Warm = False,
    no_check: NoCheck = False,
    guard_margin: GuardMargin = 0.0,
    ungated: Ungated = False,
) -> None:
    """Serve a built model to clients of OpenAI's API."""
    build = opened(build, ungated, context)
    listener = context.with_resource(listening(host, port, socket_file))
    host = host_of(listener, host)

    from drafted_decoding.drafters import TRAINED

    from shardmill.serve.model import Limits, Settings
    from shardmill.serve.server import serve as run_server

    if holds_encoder(build):
        check_encoder(build, context)
    private, allowed = is_loopback(host), tuple(allowed_hosts or ())
    _check_allowed(allowed, host, private)
    check_drafter(drafter, draft_build, may_change=True)
    check_policy(policy)
    if drafter in TRAINED:
        check_head(drafter, build, read_manifest(build))
    if draft_build is not None:
        check_draft_build(draft_build, read_manifest(build))
    if draft_table is not None:
        _check_table(draft_table)
    settings = Settings(
        host=host,
        port=port,
        allowed_hosts=allowed,
        allowed_origins=_checked_origins(allowed_origins or ()),
        api_key=_checked_key(api_key),
        drafter=drafter,
        policy=policy,
        draft_table=draft_table,
        guard_margin=guard_margin,
        context_policy=context_policy,
        prefix_cache=prefix_cache_bytes,
        system_prompt=_read_prompt(system_prompt, prefix_cache_bytes),
        ungated=open_gates(build),
        limits=Limits(
            queue=queue,
            prompt_tokens=max_prompt_tokens,
            max_tokens=max_tokens,
            body_bytes=max_body_bytes or (PICTURED_BODY if takes_media(build) else PLAIN_BODY),
            grace_seconds=grace_seconds,
        ),
    )
    if settings.api_key is None and (allowed or not private) and not host.startswith(UNIX):
        reached = ", ".join(allowed) or host
        typer.echo(f"shardmill: anyone who reaches {reached} may use this server: set SHARDMILL_API_KEY", err=True)
    if log_level != "warning":
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("shardmill").setLevel(log_level.upper())
    warming = programs(build, draft_build) if warm else None

    def announce(greeting: str) -> None:
        with suppress(OSError):  # a log on a full disk is no reason to serve nobody
            typer.echo(greeting)
            if not host.startswith(UNIX):
                typer.echo(f"the page to try it in a browser: {greeting.rpartition(' ')[2].removesuffix('v1')}")

    load = loading(build, draft_build, precision, context_policy, chat_template, no_check)
    run_server(load, settings, listener, announce, warming)


def loading(
    build: Path,
    draft_build: Path | None,
    precision: str,
    context_policy: ContextPolicy,
    chat_template: Path | None,
    no_check: bool,
) -> Callable[[], Model | Reader]:
    """Return what loads a build for a server, and checks it once on this machine unless `no_check`."""
    from shardmill.runtime import label
    from shardmill.serve import model as serving

    def load() -> Model | Reader:
        if holds_encoder(build):
            reader = label.load_reader(build, precision)
            return replace(reader, checked=check_once(build, reader.encoder, precision, no_check))
        model = serving.load_model(build, draft_build, precision, context_policy, chat_template)
        return replace(model, checked=check_once(build, model.engine, precision, no_check))

    return load


def programs(build: Path, draft_build: Path | None) -> int:
    """Return how many programs a server loads. Raises ShardmillError if a folder holds no finished build."""
    manifests = [read_manifest(build, ENCODER if holds_encoder(build) else RUNTIME)]
    manifests += [read_manifest(draft_build)] if draft_build else []
    return sum(len(manifest["parts"]) for manifest in manifests)


def check_encoder(build: Path, context: typer.Context) -> None:
    """Raise ShardmillError if an option is given that has no effect on an encoder."""
    for name in GENERATING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise ShardmillError(f"{option}: {build} is an encoder's, which generates no text; leave the option out")


def _checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Return origins as browsers send them. Raises ShardmillError for what no browser sends."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            why = "give scheme, name and port alone, such as http://localhost:3000"
            raise ShardmillError(f"--allowed-origin {origin}: {why}")
    return tuple(origin.lower() for origin in origins)


def _check_allowed(names: Sequence[str], host: str, private: bool) -> None:
    """Raise ShardmillError if `--allowed-host` has no effect, or has a value that no `Host` header can have."""
    if names and not private:
        raise ShardmillError(f"--allowed-host: a server at {host} answers to every name; leave it out, or --host")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ShardmillError(f"--allowed-host {name}: give the name alone, without scheme, port and path")


def _check_table(file: Path) -> None:
    """Raise ShardmillError now if the draft table could not be written when the server ends."""
    if not os.access(file.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if file.parent.is_dir() else "is no folder"
        raise ShardmillError(f"--draft-table {file}: {file.parent} {why}; name a file in another")


def _read_prompt(file: Path | None, prefix_cache_bytes: int) -> str:
    """Return the system prompt in a file; "" without a file.

    Raises:
        ShardmillError: the file can't be read or is empty, or no prefixes are kept.
    """
    if file is None:
        return ""
    if not prefix_cache_bytes:
        raise ShardmillError("--system-prompt needs --prefix-cache-bytes above 0")
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise ShardmillError(f"--system-prompt {file}: can't be read: {error}") from error
    if not text:
        raise ShardmillError(f"--system-prompt {file}: is empty; leave it out")
    return text


def _checked_key(key: str | None) -> str | None:
    """Return the API key without the white space around it, such as the line break at the end of a file.

    None: clients need no key.

    Raises:
        ShardmillError: the key is empty or has characters that no client could send.
    """
    if key is None:
        return None
    stripped = key.strip()
    if not stripped:
        raise ShardmillError("the API key is empty: leave out --api-key and SHARDMILL_API_KEY to ask for none")
    if not all("!" <= character <= "~" for character in stripped):
        raise ShardmillError("the API key holds white space or characters beyond ASCII, which no client can send")
    return stripped
