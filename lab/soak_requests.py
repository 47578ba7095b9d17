"""The soak's requests, whose fields are all fixed, their answers, and the adapters that some requests name."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafted_decoding.drafters import BY_ITSELF
from openai import AsyncOpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from shardmill.bench.prompts import of_tasks
from shardmill.bench.server import SHARDMILL

TASKS = ("code_edit", "summary", "question", "copying", "free_text")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "ok": {"type": "boolean"}},
          "required": ["name", "ok"], "additionalProperties": False}  # fmt: skip
TEMPLATE = """{% if tools %}Tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for t in tools %}{{ t.function | tojson }}
{% endfor %}{% endif %}{% for m in messages %}# {{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}# assistant
{% endif %}"""
SAID = ("import os", "def read(path):", "    return path", "class Reader:", "for line in file:", "try:", "# the end")
ADAPTERS = ("soak-0", "soak-1")
CHANGE = 0.125  # standard deviation of an adapter's numbers: at 0.03 most answers stay the same
NEAR = 1e-3  # how far apart two log-probabilities may be: passes of other widths round otherwise
Answer = list[Any]  # of texts, reasons and numbers


@dataclass(frozen=True)
class Request:
    """A request whose fields are all fixed, so its answer is fixed too."""

    kind: str
    path: str  # under /v1
    body: dict[str, Any]


def same(got: Any, expected: Any) -> bool:
    """Compare answers: numbers nearly, all else exactly."""
    if isinstance(got, float) and isinstance(expected, float):
        return math.isclose(got, expected, rel_tol=0, abs_tol=NEAR)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return bool(got == expected)


@contextmanager
def adapters(build: Path) -> Iterator[dict[str, Path]]:
    """Lay random adapters into a build for the time of the block. Yields the folders that PEFT wrote, by name."""
    with tempfile.TemporaryDirectory() as folder:
        written = {name: Path(folder) / name for name in ADAPTERS}
        for seed, (name, place) in enumerate(written.items()):
            base = AutoModelForCausalLM.from_pretrained(build / "source", torch_dtype=torch.float32)
            model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in (one for key, one in model.named_parameters() if "lora_" in key):
                    weight.copy_(CHANGE * torch.randn(weight.shape, generator=generator))
            model.save_pretrained(str(place))
            subprocess.run([*SHARDMILL, "adapter", "add", str(build), str(place), "--name", name], check=True)
        try:
            yield written
        finally:
            for name in written:
                subprocess.run([*SHARDMILL, "adapter", "remove", str(build), name], check=True)


def completions(texts: Sequence[str], model: str) -> list[Request]:
    """Return completions: greedy and seeded, with all drafters, some with several choices, some of a schema."""
    made = []
    for i in range(3 * len(texts)):
        body: dict[str, Any] = {
            "model": model,
            "prompt": texts[i % len(texts)],
            "max_tokens": 12 + 7 * (i % 9),
            "temperature": 0.8 if i % 3 == 0 else 0,
            "seed": i,
            "extra_body": {"shardmill": {"drafter": BY_ITSELF[i % len(BY_ITSELF)]}},
        }
        body |= {"logprobs": 3} if i % 4 == 1 else {}
        body |= {"stop": ["\n\n", "return"]} if i % 4 == 2 else {}
        body |= {"n": 3, "max_tokens": 12} if i % 6 == 3 else {}
        if i % 10 == 9 and importlib.util.find_spec("llguidance"):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
            body["extra_body"] = {**body["extra_body"], "response_format": form}
        made.append(Request("n > 1" if "n" in body else "completion", "completions", body))
    return made


def others(texts: Sequence[str], model: str) -> list[Request]:
    """Return requests of the other addresses, and some for each adapter."""
    function: dict[str, Any] = {"name": "answer", "description": "Say it.", "parameters": SCHEMA}
    tool = {"type": "function", "function": function}
    made = []
    for i, text in enumerate(texts):
        asked = [{"role": "user", "content": text[-200:]}]
        chosen: Any = "auto" if i % 2 else "required"
        body = {"model": model, "messages": asked, "max_tokens": 40, "temperature": 0, "seed": i}
        made.append(Request("tools", "chat", body | {"tools": [tool], "tool_choice": chosen}))
        made.append(Request("n > 1", "chat", body | {"n": 2, "temperature": 0.7, "max_tokens": 10}))
        body = {"model": model, "input": asked, "max_output_tokens": 30, "temperature": 0, "store": False}
        tools = {"tools": [{"type": "function", **function}], "tool_choice": "auto"} if i % 2 else {}
        made.append(Request("response", "responses", body | {"instructions": "Be brief."} | tools))
        labels = [" yes", " no", " something else entirely"]
        body = {"model": model, "input": [f"{text[-300:]}\n{said}" for said in SAID[: 1 + i % 4]], "labels": labels}
        made.append(Request("decide", "decide", body))
        made.append(Request("decide", "decide", {"model": model, "messages": asked, "labels": labels[:2]}))
        for name in (f"{model}:{adapter}" for adapter in ADAPTERS):
            body = {"model": name, "prompt": text, "max_tokens": 20, "temperature": 0.8 if i % 3 == 0 else 0, "seed": i}
            drafter = {"extra_body": {"shardmill": {"drafter": BY_ITSELF[i % len(BY_ITSELF)]}}}
            made.append(Request("adapter", "completions", body | drafter))
        made.append(Request("adapter", "decide", {"model": name, "input": text[-300:], "labels": labels}))
    return made


async def converse(client: AsyncOpenAI, model: str, number: int, told: str) -> list[tuple[Request, Answer]]:
    """Return the turns of a conversation that is held alone; every third one is held with an adapter."""
    name = f"{model}:{ADAPTERS[number % 2]}" if number % 3 == 2 else model
    messages: list[dict[str, Any]] = [{"role": "system", "content": told}]
    turns = []
    for said in random.Random(number).sample(SAID, 4):
        messages = [*messages, {"role": "user", "content": f"{said}  # {number}"}]
        body = {"model": name, "messages": messages, "max_tokens": 24, "temperature": 0}
        turn = Request("conversation", "chat", body)
        turns.append((turn, (await whole(client, turn))[0]))
        messages = [*messages, {"role": "assistant", "content": turns[-1][1][0][0]}]
    return turns


def items(response: Any) -> Answer:
    """Return what a response of /v1/responses says."""
    said = [(one.type, one.name, one.arguments) if one.type == "function_call" else
            (one.type, "".join(part.text for part in one.content)) for one in response.output]  # fmt: skip
    return [said, response.status]


async def whole(client: AsyncOpenAI, request: Request) -> tuple[Answer, int]:
    """Return an answer in one piece, and how many tokens of its prompt were cached."""
    response: Any
    if request.path == "decide":
        response = await client.post("/decide", body=request.body, cast_to=object)
        cached = response["usage"]["prompt_tokens_details"]["cached_tokens"]
        return [[one["label"], *((each["label"], each["logprob"]) for each in one["labels"])]
                for one in response["data"]], cached  # fmt: skip
    if request.path == "responses":
        response = await client.responses.create(**request.body)
        return items(response), response.usage.input_tokens_details.cached_tokens
    if request.path == "completions":
        response = await client.completions.create(**request.body)
        said = [[one.text, [], one.finish_reason, list((one.logprobs and one.logprobs.token_logprobs) or ())]
                for one in response.choices]  # fmt: skip
    else:
        response = await client.chat.completions.create(**request.body)
        said = []
        for one in response.choices:
            calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls or ()]
            said.append([one.message.content or "", calls, one.finish_reason, []])
    return said, response.usage.prompt_tokens_details.cached_tokens


async def streamed(client: AsyncOpenAI, request: Request, pause: float = 0.0, most: int = 1 << 30) -> Answer:
    """Return an answer as it comes, with a pause after each piece; given up after `most` pieces."""
    create: Any = {"completions": client.completions, "chat": client.chat.completions, "responses": client.responses}
    said: Answer = [["", [], None, []] for _ in range(request.body.get("n", 1))]
    deltas, last = "", None
    async with await create[request.path].create(**request.body, stream=True) as stream:
        async for chunk in stream:
            if request.path == "responses":
                deltas += chunk.delta if chunk.type == "response.output_text.delta" else ""
                last = getattr(chunk, "response", last)
            for choice in getattr(chunk, "choices", ()):
                one = said[choice.index]
                one[2] = choice.finish_reason or one[2]
                if request.path == "completions":
                    one[0] += choice.text
                    one[3] += (choice.logprobs and choice.logprobs.token_logprobs) or ()
                    continue
                one[0] += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    one[1] += [("", "")] * (call.index + 1 - len(one[1]))
                    name, arguments = one[1][call.index]
                    more = call.function.arguments or ""
                    one[1][call.index] = (name + (call.function.name or ""), arguments + more)
            most -= 1
            if not most:
                break
            await asyncio.sleep(pause)
    if request.path == "responses" and last is not None:
        text = "".join(words[-1] for words in items(last)[0] if words[0] == "message")
        return items(last) if text == deltas else ["the deltas differ", deltas, text]
    return said


async def ask_alone(client: AsyncOpenAI, model: str, tasks: Path, talks: int) -> list[list[tuple[Request, Answer]]]:
    """Return every request with its answer, the turns of each conversation together."""
    prompts = of_tasks(tasks, TASKS, 99, lambda text: list(text.encode()))
    texts = [bytes(prompt.tokens).decode() for prompt in prompts]
    requests = [*completions(texts, model), *others(texts, model)]
    alone = [[(one, (await whole(client, one))[0])] for one in requests]
    adapted = [answer for [(one, answer)] in alone if one.kind == "adapter" and one.path == "completions"]
    alike = sum(map(same, adapted[::2], adapted[1::2]))  # one text, both adapters
    if 2 * alike > len(texts):
        raise SystemExit("the adapters change too few answers")
    return alone + [await converse(client, model, number, texts[number % 2][:600]) for number in range(talks)]
