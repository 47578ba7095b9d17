"""The requests for generated text: their fields and what they allow together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from drafted_decoding import DRAFTERS
from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, field_validator, model_validator

from shardmill.serve.protocol import (
    LONGEST_REGEX,
    MOST_CHOICES,
    MOST_PROMPTS,
    MOST_STOPS,
    MOST_TEXTS,
    MOST_TOOLS,
    NO_EFFECT,
    AllowedTools,
    ChatMessage,
    Effort,
    FunctionDefinition,
    NamedTool,
    Stop,
    Strict,
    Tool,
)


class Extension(Strict):
    """The object `"shardmill": {...}`: options that OpenAI's interface lacks."""

    drafter: Literal[DRAFTERS] | None = None  # type: ignore[valid-type]
    private: bool = False
    figures: bool = False
    accept_top_p: float | None = Field(default=None, gt=0, le=1)


class StreamOptions(Strict):
    """The object `stream_options`."""

    accepted = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Strict):
    """The object `response_format.json_schema`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The object `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema.schema")
        return self


class StructuredOutputs(Strict):
    """The object `structured_outputs`, as vLLM has it: what an answer must look like."""

    schema_: dict[str, Any] | None = Field(None, alias="json")
    regex: Annotated[str, Field(min_length=1, max_length=LONGEST_REGEX)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_TEXTS)] | None = (
        None
    )

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum(one is not None for one in (self.schema_, self.regex, self.choice)) != 1:
            raise ValueError("structured_outputs takes one of json, regex and choice")
        return self


class GenerationRequest(Strict):
    """The fields of both kinds of requests."""

    accepted = NO_EFFECT
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    shardmill: Extension = Field(default_factory=Extension)

    @model_validator(mode="after")
    def _streams_if_it_says_how(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed: leave out stream")
        if self.structured_outputs is not None and self.response_format not in (None, ResponseFormat()):
            raise ValueError("structured_outputs and response_format say two things: leave out one")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def ends(self, usual: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end the answer, given the tokens that usually end one."""
        return tuple(dict.fromkeys([*(() if self.ignore_eos else usual), *(self.stop_token_ids or ())]))

    @property
    def choices(self) -> int:
        """Return how many choices the answer has."""
        return self.n or 1

    @property
    def prompt_top(self) -> int | None:
        """Return how many of the likeliest tokens to report for each of the prompt's; None for none of its tokens."""
        return self.prompt_logprobs


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    max_tokens: int | None = Field(None, ge=0)
    prompt: str | list[int] | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=MOST_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    echo: bool | None = None

    @field_validator("best_of")
    @classmethod
    def _keeps_all(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 1, info.data.get("n")):
            raise ValueError("must be as large as n, since no answer is dropped")
        return value

    @model_validator(mode="after")
    def _asks_for_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 asks for no token: it needs echo or prompt_logprobs")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts. Each prompt has its own choices."""
        if isinstance(self.prompt, str) or not isinstance(self.prompt[0] if self.prompt else 0, str | list):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def choices(self) -> int:
        """See `GenerationRequest`."""
        return len(self.prompts) * (self.n or 1)

    @property
    def top(self) -> int | None:
        """Return how many of the likeliest tokens to report; None for no log-probabilities."""
        return self.logprobs

    @property
    def prompt_top(self) -> int | None:
        """See `GenerationRequest`."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((top for top in asked if top is not None), default=None)


def _checked_variables(variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a template's variables. A template would take the text "false" for true."""
    for name in ("enable_thinking", "thinking"):
        if not isinstance(variables.get(name, True), bool):
            raise ValueError(f"{name} must be true or false")
    return variables


TemplateVariables = Annotated[dict[str, JsonValue], AfterValidator(_checked_variables)]


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    accepted = NO_EFFECT | {"verbosity"}
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatRequest:
        if self.continue_final_message:
            last = self.messages[-1]
            if self.add_generation_prompt:
                raise ValueError("continue_final_message goes on with a message, add_generation_prompt begins one")
            if last.role != "assistant" or not last.content or last.tool_calls:
                raise ValueError("continue_final_message needs a last message of role assistant with text alone")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        for name in self._chosen or ():
            if name not in names:
                raise ValueError(f"tool_choice: no tool has the name {name!r}")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        """Return the names of the functions that the tool choice names; None if it names none."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [self.tool_choice.function.name] if isinstance(self.tool_choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def top(self) -> int | None:
        """Return how many of the likeliest tokens to report; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def usable(self) -> list[Tool]:
        """Return the tools that the model is shown: no tool if the tool choice is `none`."""
        shown = self._chosen if isinstance(self.tool_choice, AllowedTools) else None
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool for tool in tools if shown is None or tool.function.name in shown]

    @property
    def functions(self) -> list[FunctionDefinition]:
        """Return the functions that the model may call."""
        named = self._chosen
        return [tool.function for tool in self.usable if named is None or tool.function.name in named]

    @property
    def ending(self) -> dict[str, bool]:
        """Return how the conversation's text ends, as transformers says it; by default where an answer begins."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": False} if self.add_generation_prompt is False else {}

    @property
    def images(self) -> list[str]:
        """Return the addresses of all images, in order."""
        return [url for message in self.messages for url in message.images]

    @property
    def sounds(self) -> list[str]:
        """Return all sounds in base64, in order."""
        return [data for message in self.messages for data in message.sounds]

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as templates expect them; a tool's message gets the name of the function called."""
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        messages = [message.as_template_input() for message in self.messages]
        for original, message in zip(self.messages, messages, strict=True):
            if original.role == "tool" and (name := original.name or names.get(original.tool_call_id or "")):
                message["name"] = name
        return messages


class TokenizeRequest(Strict):
    """The body of POST /tokenize, as vLLM has it: a text, or a conversation, which the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give prompt or messages")
        return self

    def as_chat(self, model: str) -> ChatRequest:
        """Return the chat request with this conversation."""
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        return ChatRequest.model_validate({"model": model} | {name: getattr(self, name) for name in names})


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
