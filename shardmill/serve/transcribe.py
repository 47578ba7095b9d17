"""`POST /v1/audio/transcriptions`, as OpenAI's API has it: a conversation of one sound, whose answer is its text."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardmill.files import parse_json
from shardmill.serve.answer import Answer
from shardmill.serve.jobs import Item, Work
from shardmill.serve.model import Model
from shardmill.serve.protocol import NO_SOUNDS, first_complaint, invalid
from shardmill.serve.requests import ChatRequest

Json = dict[str, Any]
FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature")
FORMATS = ("json", "text")
WITHOUT_EFFECT = {"stream": "false"}  # what clients send, and what it then says
BODY: Json = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "model"],
                    "properties": {name: {"type": "string"} for name in FIELDS}
                    | {"file": {"type": "string", "format": "binary"}, "response_format": {"enum": [*FORMATS]}},
                }
            }
        },
    }
}


@dataclass(frozen=True)
class Asked:
    """A form that was checked.

    Attributes:
        chat: the conversation.
        form: of the answer, one of FORMATS.
    """

    chat: ChatRequest
    form: str


async def _read_form(request: Request, model: Model) -> Asked:
    """Return what a form asks for.

    Raises:
        ApiError: it can't be honoured.
    """
    if model.sounds is None:
        raise invalid(NO_SOUNDS, "file")
    rules = model.sounds.rules.transcription
    fields, content = await _fields(request)
    for name, value in fields.items():
        if name not in FIELDS and value != WITHOUT_EFFECT.get(name, ""):
            raise invalid(f"{name!r} is not supported: leave it out", name)
    if not content:
        raise invalid("file: send a sound as a file", "file")
    if (form := fields.get("response_format") or "json") not in FORMATS:
        raise invalid(f"response_format {form!r}: only {' and '.join(FORMATS)} are written here", "response_format")
    user = [{"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode()}}]
    messages: list[Json] = [{"role": "user", "content": user}]
    if prompt := fields.get("prompt"):
        messages.insert(0, {"role": "system", "content": prompt})
    body: Json = {"model": fields.get("model") or "", "messages": messages, "temperature": 0}
    if temperature := fields.get("temperature"):
        body["temperature"] = temperature
    if language := fields.get("language"):
        names = rules.languages if rules else {}
        if language not in {*names, *names.values()}:
            raise invalid(f"language {language!r}: the model knows {', '.join(names) or 'none by name'}", "language")
        assert rules is not None
        begun = rules.begin.format(language=names.get(language, language))
        messages.append({"role": "assistant", "content": begun})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    try:
        return Asked(ChatRequest.model_validate(body), form)
    except ValidationError as error:
        raise first_complaint(error.errors()) from error


async def _fields(request: Request) -> tuple[dict[str, str], bytes]:
    """Return a form's fields that are texts, and the content of its file.

    Raises:
        ApiError: the body is no form, a field comes twice, or this installation reads no forms.
    """
    try:
        import python_multipart  # noqa: F401  # which starlette reads forms with
    except ImportError as error:
        raise invalid("this server reads no files: install shardmill with the extra audio") from error
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise invalid("the request's body must be a form with a file, sent as Content-Type: multipart/form-data")
    fields, content = dict[str, str](), b""
    try:
        async with request.form(max_files=1, max_fields=16) as form:
            for name, value in form.multi_items():
                if name in fields:
                    raise invalid(f"{name}: is there twice; send it once", name)
                fields[name] = "" if isinstance(value, UploadFile) else value
                if isinstance(value, UploadFile):
                    if name != "file":
                        raise invalid(f"{name}: is a file; only `file` may be one", name)
                    content = await value.read()
    except HTTPException as error:
        raise invalid(f"the request's form can't be read: {error.detail}") from error
    return fields, content


class Transcript(Answer):
    """The answer to a form, see `Answer`."""

    def __init__(self, asked: Asked, model: Model, works: Sequence[Work]) -> None:
        super().__init__(asked.chat, model, works)
        assert model.sounds is not None
        self._rules = model.sounds.rules.transcription

    def whole(self, answers: Sequence[list[Item]]) -> Json:
        """Return the transcript as one object, from all items of its job."""
        done = super().whole(answers)
        text, counted = done["choices"][0]["message"]["content"] or "", done["usage"]
        audio = counted["prompt_tokens_details"]["audio_tokens"]
        return {
            "text": self._rules.text(text) if self._rules else text.strip(),
            "usage": {
                "type": "tokens",
                "input_tokens": counted["prompt_tokens"],
                "input_token_details": {"audio_tokens": audio, "text_tokens": counted["prompt_tokens"] - audio},
                "output_tokens": counted["completion_tokens"],
                "total_tokens": counted["total_tokens"],
            },
        }


def add_transcriptions(app: FastAPI, model: Model, answer: Callable[..., Awaitable[Response]]) -> None:
    """Add the endpoint; `answer` runs a conversation, given the request and what makes the answer."""

    @app.post("/v1/audio/transcriptions", response_model=None, openapi_extra=BODY)
    async def transcriptions(request: Request) -> Response:
        """Return the text of a sound, as OpenAI's API does."""
        asked = await _read_form(request, model)
        response = await answer(asked.chat, request, make=partial(Transcript, asked, model))
        if asked.form == "json":
            return response
        text = parse_json(bytes(response.body))["text"]
        return Response(f"{text}\n", media_type="text/plain; charset=utf-8")
