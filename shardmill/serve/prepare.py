"""Turns a request into work for the engine: tokens, limits, sampling, grammar. Runs outside the event loop."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from shardmill.decode import SEEDS, Constraint, DecodeError, JsonSchema, Options, Sampling
from shardmill.serve.errors import invalid
from shardmill.serve.job import Work
from shardmill.serve.model import Model
from shardmill.serve.pages import check_name
from shardmill.serve.schema import ChatRequest, CompletionRequest, Request
from shardmill.serve.settings import Settings

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def prepare(request: CompletionRequest | ChatRequest, model: Model, settings: Settings) -> Work:
    """Check a request against the model and the limits, and return the engine's work.

    Raises:
        ApiError: the request can't be honoured.
    """
    check_name(request.model, model.name)
    prompt = _chat_prompt(request, model) if isinstance(request, ChatRequest) else _text_prompt(request, model)
    room = _check_prompt(prompt, model, settings)
    drafter = request.shardmill.drafter or settings.drafter
    if drafter == "draft_model" and model.draft_session is None:
        raise invalid("drafter draft_model needs a server started with --draft-build", "shardmill.drafter")
    try:
        sampling = _sampling(request)
        sampling.check_vocab(model.engine.vocab)
        options = Options(
            sampling=sampling,
            detokenize=model.decode,
            stop=request.stops,
            constraint=_constraint(request, model),
            top_logprobs=request.top,
            guard_margin=settings.guard_margin,
            private=request.shardmill.private,
        )
    except DecodeError as error:
        raise invalid(str(error)) from error
    return Work(tuple(prompt), _max_tokens(request, room, settings), drafter, options)


def _text_prompt(request: CompletionRequest, model: Model) -> Sequence[int]:
    """Return the tokens of a text to continue; a prompt may already be tokens."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return model.encode(prompt)
    if isinstance(prompt[0] if prompt else 0, str):
        return model.encode(str(prompt[0]))
    return [int(token) for token in prompt]


def _chat_prompt(request: ChatRequest, model: Model) -> Sequence[int]:
    """Return the tokens of a conversation, rendered by its template, which also writes the beginning-of-text token."""
    if model.template is None:
        raise invalid(f"{model.name!r} has no chat template: use /v1/completions", code="no_chat_template")
    try:
        text = model.template([message.as_template_input() for message in request.messages])
    except Exception as error:  # templates may raise any exception
        raise invalid(f"the chat template refused the messages: {error}", "messages") from error
    return model.encode(text, special=False)


def _check_prompt(prompt: Sequence[int], model: Model, settings: Settings) -> int:
    """Raise ApiError for a prompt that is empty, too long or of another vocabulary.

    Returns:
        The most tokens to generate: one more than fit, so that an answer that fills the context reports it.
    """
    if not prompt:
        raise invalid("the prompt is empty: give at least one token", "prompt")
    slots = model.engine.slots
    slides = settings.context_policy == "slide"
    most = settings.limits.prompt_tokens or slots
    if not slides:
        most = min(slots, most)
    if len(prompt) > most:
        message = f"the prompt has {len(prompt)} tokens, at most {most} are allowed: shorten it"
        raise invalid(message, code="context_length_exceeded")
    if not all(0 <= token < model.engine.vocab for token in prompt):
        raise invalid(f"the prompt holds a token outside the vocabulary of {model.engine.vocab}", "prompt")
    if slides:
        return settings.limits.max_tokens or slots
    return slots - len(prompt) + 2  # the last token needs no slot


def _max_tokens(request: CompletionRequest | ChatRequest, room: int, settings: Settings) -> int:
    wanted = request.max_tokens
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or wanted or room
    wanted = wanted or COMPLETION_TOKENS
    most = settings.limits.max_tokens or (room if settings.context_policy == "slide" else None)
    if most is None or wanted <= most:
        return min(wanted, room)
    if request.max_tokens is None and getattr(request, "max_completion_tokens", None) is None:
        return min(most, room)
    raise invalid(f"max_tokens is {wanted}, at most {most} are allowed", "max_tokens")


def _sampling(request: Request) -> Sampling:
    """Return the sampling options; OpenAI's defaults are temperature 1 and a random seed."""
    seed = secrets.randbits(63) if request.seed is None else request.seed % SEEDS
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        seed=seed,
        logit_bias=request.logit_bias or {},
        accept_top_p=request.shardmill.accept_top_p,
    )


def _constraint(request: Request, model: Model) -> Constraint | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    schema = wanted.json_schema.schema_ if wanted.json_schema else {"type": "object"}
    if not model.eos:
        raise invalid("response_format needs a model with an end-of-text token", "response_format")
    return JsonSchema(schema, model.grammar_tokenizer())
