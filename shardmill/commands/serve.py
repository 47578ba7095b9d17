"""`shardmill serve`: a built model behind OpenAI's HTTP interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.generate import (
    DRAFTERS,
    POLICIES,
    Precision,
    check_drafter,
    check_policy,
    engine_name,
    load_engine,
    load_tokenizer,
)
from shardmill.runtime.manifest import read_manifest

if TYPE_CHECKING:
    from shardmill.serve.model import Model

LIMIT = "default: what the context holds"


def serve(
    build: Annotated[Path, typer.Argument(help="Folder of a built model, e.g. build/demo.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="SHARDMILL_API_KEY", help="Key that clients must send; safer as a variable.")
    ] = None,
    drafter: Annotated[str, typer.Option(help=f"For requests that name none: {DRAFTERS}.")] = "ngram",
    draft_build: Annotated[Path | None, typer.Option(help="The draft model's build folder.")] = None,
    policy: Annotated[str, typer.Option(help=f"How much is drafted: {POLICIES}.")] = "cost_model",
    draft_table: Annotated[
        Path | None,
        typer.Option(
            help="File that learned begins with, if there is one, and that is written at the end. "
            "It holds token sequences of the requests."
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are answered 429.")] = 64,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help=f"Longest prompt; {LIMIT}.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help=f"Longest answer; {LIMIT}.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Longest request body.")] = 1 << 20,
    grace_seconds: Annotated[float, typer.Option(min=0, help="Time for the running request at shutdown.")] = 10.0,
    precision: Precision = "fp32",
    guard_margin: Annotated[
        float, typer.Option(min=0, help="Rows of wide passes whose two best logits are closer are run again alone.")
    ] = 0.0,
) -> None:
    """Serve a built model to clients of OpenAI's API."""
    from shardmill.serve.server import serve as run
    from shardmill.serve.settings import Limits, Settings

    check_drafter(drafter, draft_build)
    check_policy(policy)
    limits = Limits(
        queue=queue,
        prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        body_bytes=max_body_bytes,
        grace_seconds=grace_seconds,
    )
    settings = Settings(
        host=host,
        port=port,
        api_key=api_key or None,
        drafter=drafter,
        policy=policy,
        draft_table=draft_table,
        guard_margin=guard_margin,
        limits=limits,
    )
    if not settings.is_loopback and settings.api_key is None:
        typer.echo(f"shardmill: anyone who reaches {host} may use this server: set SHARDMILL_API_KEY", err=True)
    run(lambda: load_model(build, draft_build, precision), settings, typer.echo)


def load_model(build: Path, draft_build: Path | None, precision: str) -> Model:
    """A build folder as something to serve or to talk to."""
    from shardmill import machine
    from shardmill.decode import Session
    from shardmill.files import digest
    from shardmill.serve.model import Model
    from shardmill.serve.template import load_template

    manifest = read_manifest(build)
    return Model(
        name=manifest["model"],
        tokenizer=load_tokenizer(build, manifest),
        template=load_template((build / manifest["tokenizer"]["path"]).parent),
        engine=load_engine(build, precision),
        engine_name=engine_name(),
        eos=tuple(manifest["eos_token_ids"]),
        draft_session=Session(load_engine(draft_build, precision)) if draft_build else None,
        fingerprint=digest(manifest),
        threads=machine.threads(),
    )
