"""Formats of function calls: which one a chat template teaches, and a grammar of the calls that a request allows.

The formats are as vLLM's and SGLang's parsers know them (vllm/tool_parsers, sglang/srt/function_call), and as the
templates themselves write earlier calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Schemas = Mapping[str, Mapping[str, Any]]  # function -> the JSON schema of its arguments
CALL_KEYS = ("name", "arguments", "parameters", "type", "id", "function")  # a key of these begins a call in JSON
LONGEST_NAME = 64  # characters of a function's name, as in OpenAI's API
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
Style = Literal["json", "python", "gemma", "xml", "harmony"]


@dataclass(frozen=True)
class ToolFormat:
    """How the models of a family write calls.

    Attributes:
        name: the format's name, for messages.
        marks: a template that contains one of these texts teaches the format.
        style: how a call spells its arguments.
        begin: the text before a call, or before a list of calls.
        end: the text after the call or the list; empty if there is no such text.
        call: a call as the model writes it, with NAME and ARGUMENTS in their places.
        around: the text before and after all calls, beside `begin` and `end`.
        between: the text between two calls; None if an answer holds one call only.
        skipped: characters that may stand before and after a call, beside white space.
        unmarked: texts before and after calls that may also begin an answer, in place of `begin` and `end`.
        titled: whether a name may stand before the arguments alone: `NAME{...}`.
        tagged: whether a function may stand in tags between `begin` and `end`: `<function=NAME>...</function>`.
        lines: whether tags in XML stand on lines of their own.
        tokens: the special tokens that the format needs, as text.
    """

    name: str
    marks: tuple[str, ...]
    style: Style
    begin: str
    end: str
    call: str
    around: tuple[str, str] = ("", "")
    between: str | None = ""
    skipped: str = ""
    unmarked: tuple[tuple[str, str], ...] = ()
    titled: bool = False
    tagged: bool = False
    lines: bool = True
    tokens: tuple[str, ...] = ()


_NAMED = '{"name": "NAME", "arguments": ARGUMENTS}'
FORMATS = (  # the first whose mark a template contains
    ToolFormat(  # openai/harmony, docs/format.md; the call ends with <|call|>, a token that ends the answer
        "harmony",
        ("<|channel|>",),
        "harmony",
        "<|channel|>",
        "",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        between=None,
        tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    ToolFormat(  # vllm/tool_parsers/gemma4_tool_parser.py
        "gemma",
        ("<|tool_call>",),
        "gemma",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_call>call:NAME{ARGUMENTS}<tool_call|>",
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    ToolFormat(  # vllm/tool_parsers/lfm2_tool_parser.py; some templates of the family write JSON in the same place
        "lfm2",
        ("<|tool_call_start|>", "<|tool_list_start|>"),
        "python",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "NAME(ARGUMENTS)",
        ("<|tool_call_start|>[", "]<|tool_call_end|>"),
        ", ",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat(  # vllm/tool_parsers/mistral_tool_parser.py: tokenizers from version 11 on
        "mistral-11",
        ("[ARGS]",),
        "json",
        "[TOOL_CALLS]",
        "",
        "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        titled=True,
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        "json",
        "[TOOL_CALLS]",
        "",
        _NAMED,
        ("[TOOL_CALLS][", "]"),
        ", ",
        ",[]",
        titled=True,
        tokens=("[TOOL_CALLS]",),
    ),
    ToolFormat(  # vllm/tool_parsers/seed_oss_tool_parser.py
        "seed-oss",
        ("<seed:tool_call>",),
        "xml",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
        between="\n",
        tagged=True,
        lines=False,
        tokens=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    ToolFormat(  # vllm/tool_parsers/qwen3coder_tool_parser.py
        "qwen-xml",
        ("<parameter=",),
        "xml",
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        between="\n",
        tagged=True,
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(  # functionary, and Llama 3.1 for functions of the user's own: sglang's JSON between tags
        "function-json",
        (FUNCTION,),
        "json",
        FUNCTION,
        END_OF_FUNCTION,
        f"{FUNCTION}NAME>ARGUMENTS{END_OF_FUNCTION}",
        tagged=True,
    ),
    ToolFormat(  # vllm/tool_parsers/granite_tool_parser.py; Granite 3.1 writes another mark, or none
        "granite",
        ("<|tool_call|>", "available_tools<|end_of_role|>"),
        "json",
        "<|tool_call|>",
        "",
        _NAMED,
        ("<|tool_call|>[", "]"),
        ", ",
        ",[]",
        unmarked=(("<tool_call>", ""), ("", "")),
        tokens=("<|tool_call|>",),
    ),
    ToolFormat(  # vllm/tool_parsers/hermes_tool_parser.py; Qwen2.5-Coder writes other marks, or none
        "hermes",
        ("<tool_call>",),
        "json",
        "<tool_call>",
        "</tool_call>",
        f"<tool_call>\n{_NAMED}\n</tool_call>",
        between="\n",
        skipped=",[]",
        unmarked=(("```json", "```"), ("```", "```"), ("<tools>", "</tools>"), ("", "</tool_call>")),
        tagged=True,
        tokens=("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(  # vllm/tool_parsers/llama_tool_parser.py
        "llama",
        ("<|python_tag|>", '"parameters": dictionary'),
        "json",
        "<|python_tag|>",
        "",
        '{"name": "NAME", "parameters": ARGUMENTS}',
        between="; ",
        skipped=";",
        unmarked=(("```json", "```"), ("```", "```"), ("", "")),
        tokens=("<|python_tag|>",),
    ),
)


def find_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template's text teaches; None if the format is unknown."""
    return next((form for form in FORMATS if any(mark in template for mark in form.marks)), None)
