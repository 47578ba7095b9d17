"""`shardmill generate`: text from a built model, streamed as it comes, or one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from shardmill.commands.build import Build
from shardmill.commands.drafting import (
    ContextOption,
    DraftBuild,
    DrafterName,
    Lossy,
    PolicyName,
    Precision,
    check_context,
    check_draft_build,
    check_drafter,
    check_policy,
    make_drafter,
)
from shardmill.commands.outcome import closing_line, consume, summary
from shardmill.commands.prompt import read_prompt
from shardmill.runtime import load
from shardmill.runtime.manifest import read_manifest


def generate(
    build: Build,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the text to continue; - is stdin.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    drafter: DrafterName = "ngram",
    draft_build: DraftBuild = None,
    policy: PolicyName = "cost_model",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    context_policy: ContextOption = "stop",
    accept_top_p: Lossy = None,
    precision: Precision = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
) -> None:
    """Continue a text with a built model."""
    from shardmill.decode import Options, Sampling, Session, check_prompt, create_policy
    from shardmill.decode import generate as decode

    check_drafter(drafter, draft_build)
    check_policy(policy)
    text = read_prompt(prompt, prompt_file)
    sampling = Sampling(temperature=temperature, seed=seed, accept_top_p=accept_top_p)
    manifest = read_manifest(build)
    if draft_build is not None:
        check_draft_build(draft_build, manifest)
    check_context(context_policy, manifest)
    tokenizer = load.load_tokenizer(build, manifest)
    tokens: list[int] = tokenizer.encode(text).ids
    check_prompt(tokens, vocab=manifest["vocab"], room=None if context_policy == "slide" else manifest["context"])
    session = Session(load.load_engine(build, precision), context_policy=context_policy)
    events = decode(
        drafter=make_drafter(drafter, draft_build, manifest["vocab"], precision, context_policy),
        policy=create_policy(policy, session.widths),
        session=session,
        prompt=tokens,
        max_new_tokens=max_new_tokens,
        eos=manifest["eos_token_ids"],
        options=Options(sampling=sampling, detokenize=tokenizer.decode),
    )
    if sys.stdout.isatty() and not as_json:  # a person reads on from the prompt; a pipe gets the new text only
        typer.secho(text, dim=True, nl=False)
    result = consume(events, None if as_json else sys.stdout)
    if as_json:
        more = {"drafter": drafter, "engine": load.engine_name(), "lossy": accept_top_p is not None}
        typer.echo(json.dumps({**summary(result), **more}))
    else:
        typer.echo()
        typer.echo(closing_line(result, load.engine_name(), accept_top_p), err=True)
