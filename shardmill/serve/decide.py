"""`POST /v1/decide`: the probabilities of given labels after texts, or after a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from drafted_decoding import LabelCalibration, LabelScores, label_probabilities
from drafted_decoding.generate import agreement
from pydantic import Field, model_validator

from shardmill.checkpoint.tokenizer import unknown_token
from shardmill.serve.jobs import DecideWork
from shardmill.serve.logprobs import LEAST
from shardmill.serve.model import Model
from shardmill.serve.protocol import MOST_TEXTS, NO_EFFECT, ApiError, ChatMessage, Strict, client_gone, invalid
from shardmill.serve.requests import ChatRequest, TemplateVariables

MOST_LABELS = 128
Text = Annotated[str, Field(min_length=1)]


class DecideRequest(Strict):
    """The body of `POST /v1/decide`: texts, or the messages of a chat, and the labels that may follow them."""

    accepted = NO_EFFECT
    model: str
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    labels: Annotated[list[Text], Field(min_length=1, max_length=MOST_LABELS)]
    logprobs: bool = True

    @model_validator(mode="after")
    def _is_about_one_thing(self) -> DecideRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("chat_template_kwargs needs messages")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels: two labels are the same")
        return self

    def as_chat(self) -> ChatRequest:
        """Return the messages as a request for an answer."""
        asked = {"messages": self.messages, "chat_template_kwargs": self.chat_template_kwargs}
        return ChatRequest.model_validate({"model": self.model, **asked})

    @property
    def texts(self) -> list[str]:
        """Return the texts; an empty list for a chat."""
        return [self.input] if isinstance(self.input, str) else self.input or []


def split_labels(
    model: Model, text: str, labels: Sequence[str], *, special: bool, most: int, gone: Callable[[], bool]
) -> DecideWork:
    """Return the tokens of a prompt and of each label after it.

    The tokenizer reads prompt and label as one text, because it may join the end of the prompt and the beginning of a
    label to one token. What is scored begins where the tokens of any of these texts leave the prompt's own.

    Args:
        model: the model, whose tokenizer is used.
        text: the prompt.
        labels: the labels.
        special: True to add the tokenizer's special tokens.
        most: tokens that the prompt may have together with a label.
        gone: returns whether nobody waits for the result any more.

    Raises:
        ApiError: the tokenizer does not know a label or tell it from another, the text is empty or too long, or nobody
            waits.
    """
    prompt = model.encode(text, special=special)
    if len(prompt) > most:  # before it is tokenised once more for each label
        raise _too_long(f"the prompt has {len(prompt)} tokens", most)
    whole: list[list[int]] = []
    for label in labels:
        if gone():
            raise client_gone()
        whole.append(model.encode(text + label, special=special))
    shared = min(agreement(prompt, one) for one in whole)
    split = [tuple(one[shared:]) for one in whole]
    unknown = unknown_token(model.tokenizer)
    for label, tokens in zip(labels, split, strict=True):
        if not tokens:
            raise invalid(f"labels: {label!r} adds no token to the text", "labels")
        if unknown in tokens:
            raise invalid(f"labels: {label!r} has a character that is unknown to the tokenizer", "labels")
    if len(set(split)) < len(split):
        again = next(i for i, tokens in enumerate(split) if tokens in split[:i])
        raise invalid(f"labels: {labels[again]!r} has the same tokens as another label", "labels")
    if not shared:
        raise invalid("the labels leave no whole token of the text before them: give a longer text")
    longest = max(map(len, whole))
    if longest > most:
        raise _too_long(f"the prompt has {longest} tokens with its longest label", most)
    return DecideWork(tuple(prompt[:shared]), tuple(split))


def _too_long(what: str, most: int) -> ApiError:
    message = f"{what}, at most {most} are allowed (the maximum context length): shorten it"
    return invalid(message, code="context_length_exceeded")


def decided(
    name: str, labels: Sequence[str], scored: Sequence[LabelScores], calibration: LabelCalibration | None
) -> dict[str, Any]:
    """Return the answer for texts in OpenAI's form of a list, each with its labels, the likeliest first."""
    prompt = sum(scores.prompt_tokens for scores in scored)
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": sum(scores.reused_tokens for scores in scored)},
    }
    rows = [
        {"object": "decision", "index": i, **_decision(labels, scores, calibration)} for i, scores in enumerate(scored)
    ]
    return {"object": "list", "model": name, "data": rows, "usage": usage}


def _decision(labels: Sequence[str], scores: LabelScores, calibration: LabelCalibration | None) -> dict[str, Any]:
    probabilities = label_probabilities(scores, labels, calibration)
    logprobs = [{"logprob": max(logprob, LEAST)} for logprob in scores.logprobs] or [{}] * len(labels)
    rows: list[dict[str, Any]] = [
        {"label": label, "probability": float(probability), **logprob}
        for label, probability, logprob in zip(labels, probabilities, logprobs, strict=True)
    ]
    rows.sort(key=lambda row: -row["probability"])
    return {"label": rows[0]["label"], "labels": rows}


def place_of(error: ApiError, field: str, index: int) -> ApiError:
    """Return an error that also names the text of the request that it is about."""
    return invalid(f"{field}.{index}: {error}", error.param or field, error.code)
