"""Checks requests against the model and the server's limits, and turns them into the engine's work."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from drafted_decoding import (
    SEEDS,
    Constraint,
    DecodeError,
    Grammar,
    GrammarTokenizer,
    JsonSchema,
    LeastLength,
    Options,
    Sampling,
)
from drafted_decoding.drafters import TRAINED
from pydantic import ValidationError

from shardmill.errors import MediaError
from shardmill.media.prompt import Seen
from shardmill.serve.answer_grammar import COMPACT, choice_answer, closed, json_value, regex_answer, write_answer
from shardmill.serve.decide import DecideRequest, place_of, split_labels
from shardmill.serve.jobs import DecideWork, Work
from shardmill.serve.model import Model, Settings
from shardmill.serve.pictures import PictureReader, picture_bytes
from shardmill.serve.protocol import (
    NO_IMAGES,
    NO_SOUNDS,
    ApiError,
    FunctionDefinition,
    NamedTool,
    first_complaint,
    invalid,
)
from shardmill.serve.requests import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from shardmill.serve.sounds import SoundReader, sound_bytes
from shardmill.serve.tool_grammar import write_grammar
from shardmill.serve.tools import FORMATS


def check_model_name(name: str, served_name: str, adapters: Sequence[str] = ()) -> str | None:
    """Return the adapter that a model's name asks for, as vLLM spells it: MODEL:ADAPTER; None for the bare model.

    Raises:
        ApiError: 404 for any other model than the served one, or for an adapter that the model lacks.
    """
    model, _, adapter = name.partition(":")
    if model != served_name or (adapter not in adapters if ":" in name else False):
        served = " and ".join(map(repr, [served_name, *(f"{served_name}:{one}" for one in adapters)]))
        message = f"the model {name!r} is not served here; {served} {'are' if adapters else 'is'}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return adapter or None


EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}  # as templates have them
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def prepare(request: CompletionRequest | ChatRequest, model: Model, settings: Settings) -> list[Work]:
    """Check a request against the model and the limits, and return the engine's work, one for each choice.

    The choices of a prompt differ by their seeds, which count up from the request's.

    Raises:
        ApiError: the request can't be honoured.
    """
    adapter = check_model_name(request.model, model.name, model.adapters())
    most = settings.limits.queue + 1  # one runs
    if request.choices > most:
        raise invalid(
            f"the request asks for {request.choices} answers, at most {most} find a place: ask for fewer", "n"
        )
    thinks, pictures = False, list[Seen]()
    if isinstance(request, ChatRequest):
        pictures = _seen(request, model, settings)
        text, tokens = _chat_prompt(request, model, pictures)
        prompts: list[Sequence[int]] = [tokens]
        rooms = [_check_prompt(tokens, model, settings, "messages", bool(pictures))]
        thinks = model.thoughts is not None and model.thoughts.opened_by(text)
    else:
        prompts, rooms = [], []
        for i, prompt in enumerate(request.prompts):
            try:
                prompts.append(model.encode(prompt) if isinstance(prompt, str) else prompt)
                rooms.append(_check_prompt(prompts[-1], model, settings))
            except ApiError as error:
                raise (error if len(request.prompts) == 1 else place_of(error, "prompt", i)) from error
    drafter = _drafter(request, model, settings)
    tools = model.tools_of(request)
    written = [] if tools is None else [*tools.tokens]
    if isinstance(request, ChatRequest) and model.thoughts is not None:
        written += [model.thoughts.begin, model.thoughts.end]
    try:
        sampling = _sampling(request, model)
        sampling.check_vocab(model.engine.vocab)
        options = [
            Options(
                sampling=replace(sampling, seed=(sampling.seed + i) % SEEDS),
                detokenize=model.decoder(written) if written else model.decode,
                stop=request.stops,
                keep_stop=bool(request.include_stop_str_in_output),
                constraint=_constraint(request, model, thinks),
                top_logprobs=request.top,
                prompt_logprobs=request.prompt_top,
                guard_margin=settings.guard_margin,
                private=request.shardmill.private,
            )
            for i in (*range(request.n or 1),) * len(prompts)
        ]
    except DecodeError as error:
        raise invalid(str(error)) from error
    each, ends = request.n or 1, request.ends(model.eos)
    return [
        Work(tuple(prompt), _max_tokens(request, room, settings), drafter, one, ends, adapter, thinks, tuple(pictures))
        for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
        for one in options[i * each : (i + 1) * each]
    ]


def _drafter(request: GenerationRequest, model: Model, settings: Settings) -> str:
    """Return the name of the drafter. Raises ApiError for one that this model lacks."""
    drafter = request.shardmill.drafter or settings.drafter
    if drafter == "draft_model" and model.draft_session is None:
        raise invalid("drafter draft_model needs a server started with --draft-build", "shardmill.drafter")
    if drafter in TRAINED and model.head_name != drafter:
        why = f"drafter {drafter} needs a build with an {TRAINED[drafter]}, which this one lacks"
        raise invalid(why, "shardmill.drafter")
    return drafter


def _seen(request: ChatRequest, model: Model, settings: Settings) -> list[Seen]:
    """Return the pictures or sounds of a conversation as the model takes them. Raises ApiError if one can't be used."""
    if not (request.images or request.sounds):
        return []
    for place, message in enumerate(request.messages):
        if message.images and model.pictures is None:
            raise invalid(f"messages.{place}.content: {NO_IMAGES}", "messages")
        if message.sounds and model.sounds is None:
            raise invalid(f"messages.{place}.content: {NO_SOUNDS}", "messages")
    what = "images" if request.images else "audio"
    if settings.context_policy == "slide":
        raise invalid(f"a context that slides can't hold {what}: the server was started with --context-policy slide")
    if request.prompt_logprobs is not None:
        raise invalid(f"prompt_logprobs can't be had of a prompt with {what}: leave one of them out", "prompt_logprobs")
    try:
        return [
            *_read(model.pictures, request.images, picture_bytes),
            *_read(model.sounds, request.sounds, sound_bytes),
        ]
    except MediaError as error:
        raise invalid(str(error), "messages") from error


def _read(
    reader: PictureReader | SoundReader | None, sent: Sequence[str], content: Callable[[str], bytes]
) -> list[Seen]:
    """Return what a reader makes of pictures or sounds, one by one. Raises MediaError if there are too many."""
    if reader is None:
        return []
    if len(sent) > reader.most:  # before any is decoded
        reader.see([b""] * len(sent))
    return [one for each in sent for one in reader.see([content(each)])]


def _chat_prompt(request: ChatRequest, model: Model, pictures: Sequence[Seen]) -> tuple[str, Sequence[int]]:
    """Return a conversation as text, in which pictures are marks, and its tokens with their rows."""
    reader: Any = model.sounds if request.sounds else model.pictures  # no model has both
    if not pictures or reader is None:
        text = _chat_text(request, model)
        return text, model.encode(text, special=False)
    prompt = reader.prompt(pictures)
    text = _chat_text(request, model, prompt.hide)
    try:
        return text, prompt.tokens(text)
    except MediaError as error:
        raise invalid(str(error), "messages") from error


def _chat_text(request: ChatRequest, model: Model, hide: Callable[[Any], Any] | None = None) -> str:
    """Return a conversation as text, rendered by its template, which also writes the beginning-of-text token.

    Args:
        request: the request.
        model: the model.
        hide: keeps what looks like an image's place in somebody's text from the template; None: there are no images.
    """
    if (request.images or request.sounds) and hide is None:
        what = "images are" if request.images else "audio is"
        raise invalid(f"{what} for /v1/chat/completions and /v1/responses: send text alone", "messages")
    if model.template is None:
        raise invalid(f"{model.name!r} has no chat template: use /v1/completions", code="no_chat_template")
    if request.functions and model.tools is None:
        known = ", ".join(form.name for form in FORMATS)
        message = f"the chat template of {model.name!r} teaches no calls in a known format ({known}): leave out tools"
        raise invalid(message, "tools")
    variables = request.chat_template_kwargs or {}
    for name in variables:
        if name not in model.template_variables:
            known = ", ".join(sorted(model.template_variables)) or "none"
            message = f"chat_template_kwargs: the chat template has no variable {name!r}; it has {known}"
            raise invalid(message, "chat_template_kwargs")
    effort = EFFORTS.get(request.reasoning_effort or "")
    if effort and "reasoning_effort" in model.template_variables:
        variables = {"reasoning_effort": effort, **variables}
    variables = {**variables, **request.ending}
    more: dict[str, Any] = {"variables": variables} if variables else {}
    if request.functions:
        more["tools"] = [tool.as_template_input() for tool in request.usable]
    try:
        conversation = request.conversation()
        if hide is not None:
            conversation, more = hide(conversation), hide(more)
        return model.template(conversation, **more)
    except Exception as error:  # templates may raise any exception
        raise invalid(f"the chat template refused the messages: {error}", "messages") from error


def _check_prompt(
    prompt: Sequence[int], model: Model, settings: Settings, param: str = "prompt", beyond: bool = False
) -> int:
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
        message = f"the prompt has {len(prompt)} tokens, at most {most} are allowed"
        message += f" (this model's maximum context length is {slots}): shorten it"
        raise invalid(message, param, "context_length_exceeded")  # by these words clients know a full context
    if not beyond and not all(0 <= token < model.engine.vocab for token in prompt):
        raise invalid(f"the prompt holds a token outside the vocabulary of {model.engine.vocab}", "prompt")
    if slides:
        return settings.limits.max_tokens or slots
    return slots - len(prompt) + 2  # the last token needs no slot


def _max_tokens(request: CompletionRequest | ChatRequest, room: int, settings: Settings) -> int:
    wanted = request.max_tokens
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or wanted or room
    wanted = COMPLETION_TOKENS if wanted is None else wanted
    most = settings.limits.max_tokens or (room if settings.context_policy == "slide" else None)
    if most is None or wanted <= most:
        return min(wanted, room)
    if request.max_tokens is None and getattr(request, "max_completion_tokens", None) is None:
        return min(most, room)
    raise invalid(f"max_tokens is {wanted}, at most {most} are allowed", "max_tokens")


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _sampling(request: GenerationRequest, model: Model) -> Sampling:
    """Return the request's sampling options.

    What it does not name is the model's if it names no temperature, otherwise OpenAI's default.
    """
    names = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)
    named = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    usual = model.sampling if request.temperature is None else {}
    return Sampling(
        **({"temperature": 1.0} | dict(usual) | named),
        seed=secrets.randbits(63) if request.seed is None else request.seed % SEEDS,
        logit_bias=request.logit_bias or {},
        accept_top_p=request.shardmill.accept_top_p,
    )


def _constraint(request: CompletionRequest | ChatRequest, model: Model, thinks: bool) -> Constraint | None:
    """Return the grammar that an answer must obey; None if it may be any text. A thought that was opened stays free."""
    form, structured = request.response_format, request.structured_outputs
    schema: dict[str, Any] | None = None
    if form is not None and form.type != "text":
        schema = form.json_schema.schema_ if form.json_schema else {"type": "object"}
    field = "response_format" if structured is None else "structured_outputs"
    if structured is not None:
        schema = structured.schema_
    answer = "" if schema is None else json_value(schema, COMPACT)
    if structured is not None and structured.regex is not None:
        answer = regex_answer(structured.regex)
    elif structured is not None and structured.choice is not None:
        answer = choice_answer(structured.choice)
    functions = request.functions if isinstance(request, ChatRequest) else []
    required = isinstance(request, ChatRequest) and request.must_call
    calls = bool(functions) and (required or bool(answer) or any(function.strict for function in functions))
    least = request.min_tokens or 0
    if not answer and not calls:
        return LeastLength(least, request.ends(model.eos), model.engine.vocab) if least else None
    if least:
        raise invalid("min_tokens says how long an answer is, and so does its form: leave out one", "min_tokens")
    if not model.eos:
        what = field if answer else "tools"
        raise invalid(f"{what} needs a model with an end-of-text token", what)
    tokenizer = model.grammar_tokenizer()
    thought_end = model.thoughts.end if thinks and model.thoughts else ""
    if not calls or model.tools is None or not isinstance(request, ChatRequest):
        functions = []
        grammar = write_answer(answer, thought_end, tokenizer.special)
    else:
        grammar = write_grammar(
            model.tools,
            functions,
            tokenizer.special,
            required=required,
            parallel=not isinstance(request.tool_choice, NamedTool) and request.parallel_tool_calls is not False,
            answer=answer,
            thought_end=thought_end,
        )
    try:
        return Grammar(grammar, tokenizer)
    except DecodeError as error:
        raise _blame(error, functions, schema, field, tokenizer) from error


def _blame(
    error: DecodeError,
    functions: Sequence[FunctionDefinition],
    answer: dict[str, Any] | None,
    field: str,
    tokenizer: GrammarTokenizer,
) -> ApiError:
    """Return an error that names the schema for which a grammar was refused; the library quotes the whole grammar."""
    schemas = [("tools", f"tools: {one.name}: ", one.parameters) for one in functions]
    for where, place, schema in [(field, f"{field}: ", answer), *schemas]:
        try:
            JsonSchema(closed(schema or {}), tokenizer)
        except DecodeError as refusal:
            return invalid(f"{place}{refusal}", where)
    where = "tools" if functions else field
    return invalid(f"{where}: {str(error).partition(chr(10))[0]}", where)


def decided_chat(request: DecideRequest, model: Model) -> str:
    """Return the conversation of a request that has one as text, which ends where a label begins.

    Raises:
        ApiError: the model is another one, or its template refuses the conversation.
    """
    check_model_name(request.model, model.name, model.adapters())
    text = _chat_text(request.as_chat(), model)
    if model.thoughts is not None and model.thoughts.opened_by(text):
        why = "the chat template opens a thought, in which a label is no answer"
        raise invalid(f"{why}: turn thinking off by chat_template_kwargs, or send a text as input", "messages")
    return text


def split_into_tokens(request: TokenizeRequest, model: Model) -> list[int]:
    """Return the tokens of a text, or of a conversation up to where the answer begins.

    Raises:
        ApiError: the model is another one, or the conversation is none or refused by its template.
    """
    check_model_name(request.model or model.name, model.name, model.adapters())
    if request.prompt is not None:
        return model.encode(request.prompt, special=request.add_special_tokens)
    try:
        chat = request.as_chat(model.name)
    except ValidationError as error:
        raise first_complaint(error.errors()) from error
    return model.encode(_chat_text(chat, model), special=False)


def prepare_decisions(
    request: DecideRequest, chat: str, model: Model, settings: Settings, gone: Callable[[], bool]
) -> Iterator[DecideWork]:
    """Check a request against the model and the limits, and yield the engine's work, one for each text at its turn.

    Args:
        request: the request.
        chat: its conversation as text, see `decided_chat`.
        model: the model.
        settings: the server's settings.
        gone: returns whether nobody waits for the answer any more; asked before each label.

    Raises:
        ApiError: the request can't be honoured, or nobody waits for it.
    """
    adapter = check_model_name(request.model, model.name, model.adapters())
    most = min(model.engine.slots, settings.limits.prompt_tokens or model.engine.slots)
    texts = request.texts if request.messages is None else [chat]
    for i, text in enumerate(texts):
        special = request.messages is None
        try:
            work = split_labels(model, text, request.labels, special=special, most=most, gone=gone)
        except ApiError as error:
            raise (place_of(error, "input", i) if isinstance(request.input, list) else error) from error
        yield replace(work, adapter=adapter, logprobs=request.logprobs)
