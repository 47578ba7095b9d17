"""Grammars of function calls: what a model may write if a request requires a call, or calls with strict arguments.

The grammars are in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md). The
arguments obey each function's JSON schema, spelled as the model's format spells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardmill.serve.answer_grammar import ANY, json_value, opened_thought, whole_grammar
from shardmill.serve.call_texts import json_types
from shardmill.serve.protocol import FunctionDefinition, invalid
from shardmill.serve.tools import CALL_KEYS, Style, ToolFormat
from shardmill.templates.render import NO_PARAMETERS

Schema = Mapping[str, Any]
_GAP = "[ \\t\\n]{0,20}"  # within an unmarked call, whose layout is the model's
_LIST_GAP = "[ \\t\\n,\\[\\]]{0,20}"  # before calls in a list
_READABLE = {  # the names of parameters that `tool_reader` finds again
    "python": re.compile(r"[^\s=,:()\[\]{}'\"]+"),
    "xml": re.compile(r"[^<>\n]{1,240}"),
    "gemma": re.compile(r"[^\s{}\[\],:\"<|>]+"),
}


def write_grammar(
    form: ToolFormat,
    functions: Sequence[FunctionDefinition],
    special: Mapping[str, int],
    *,
    required: bool,
    parallel: bool,
    answer: str = "",
    thought_end: str = "",
) -> str:
    """Return the grammar of an answer that may hold calls.

    Args:
        form: how the model writes calls.
        functions: the functions that it may call.
        special: text -> token, for the tokens that text in a grammar does not match.
        required: whether the answer must be a call.
        parallel: whether it may hold several calls.
        answer: the expression of an answer without calls; empty: any text.
        thought_end: the text that ends the thought that the prompt has opened; empty if it has opened none.

    Raises:
        ApiError: a schema has no spelling in the format.
    """
    return _Writer(form, special).written(functions, required, parallel, answer, thought_end)


class _Writer:
    """The rules of one grammar."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int]) -> None:
        self._form, self._special = form, special
        self._rules: dict[str, str] = {}
        pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._cut = re.compile(f"({pattern})") if pattern else None

    def written(
        self,
        functions: Sequence[FunctionDefinition],
        required: bool,
        parallel: bool,
        answer: str,
        thought_end: str,
    ) -> str:
        form, harmony = self._form, self._form.style == "harmony"
        marked = (form.around[0] + form.call).startswith(form.begin)
        free = not required and not answer and marked and not harmony
        lazy = free and form.begin not in self._special
        if lazy:  # the text before a call ends with the call's first text
            opening, closing = form.around
            form = replace(
                form, call=form.call.removeprefix(form.begin), around=(opening.removeprefix(form.begin), closing)
            )
        for i, function in enumerate(functions):
            self._rules[f"call_{i}"] = self._call(form, function)
        self._rules["call"] = " | ".join(f"call_{i}" for i in range(len(functions)))
        listed = form.between is not None and not (lazy and not any(form.around))
        several = f"({self._text(form.between or '')} call)*" if parallel and listed else ""
        calls = f"{self._text(form.around[0])} call {several} {self._text(form.around[1])}"
        any_number = "*" if parallel else "?"
        if harmony:
            self._rules["thought"] = self._text("<|channel|>analysis<|message|>", "TEXT", "<|end|><|start|>assistant")
            calls = f"thought* {calls}"
        if required:
            start = calls
        elif answer:
            start = f"{self._answered(answer)} | {calls}"
        elif harmony:
            start = f"thought* {self._text('<|channel|>final<|message|>', 'TEXT')} | {calls}"
        elif not marked:
            start = f"FREE | {calls}"
        elif lazy:
            self._rules["before[lazy]"] = f"FREE {json.dumps(form.begin)}"
            start = f"(before {calls}){any_number} FREE"
        else:
            start = f"FREE ({calls} FREE){any_number}"
        if free and form.unmarked:
            start = f"({start}) | {self._unmarked(form, functions, parallel)}"
        if thought_end:
            thought, rules = opened_thought(thought_end, self._special)
            start, self._rules = f"{thought} /\\n*/ ({start})", self._rules | rules
        return whole_grammar(start, self._rules | {"TEXT": ANY, "FREE": _free(form)})

    def _answered(self, answer: str) -> str:
        """Return the expression of an answer where the model writes it."""
        harmony = self._form.style == "harmony"
        return f"thought* {self._text('<|channel|>final<|message|>', f'({answer})')}" if harmony else f"({answer})"

    def _unmarked(self, form: ToolFormat, functions: Sequence[FunctionDefinition], parallel: bool) -> str:
        """Return calls that begin an answer without the format's mark, in any layout.

        A call is one lexeme up to its arguments, because free text begins in the same way. Without
        any mark there is one call only: a small model would not end.
        """
        argued = "parameters" if '"parameters"' in form.call else "arguments"
        kinds: list[str] = []
        for i, function in enumerate(functions):
            value = json_value({"type": "object"} | _parameters(function), {"whitespace_pattern": r"[ \t\n]{0,20}"})
            self._rules[f"arguments_{i}"] = f"{value} TAIL"
        for k, (begin, end) in enumerate((("", ""), *(pair for pair in form.unmarked if pair[0]))):
            for i, function in enumerate(functions):
                head = ("{", '"name"', ":", json.dumps(function.name), ",", json.dumps(argued), ":", "")
                self._rules[f"HEAD_{k}_{i}"] = f"/{_GAP}{_GAP.join(map(_escaped, (begin, *head)))}/"
            self._rules[f"unmarked_{k}"] = " | ".join(f"HEAD_{k}_{i} arguments_{i}" for i in range(len(functions)))
            kinds.append(f"unmarked_{k}")
            if begin:
                self._rules[f"END_{k}"] = f"/{_GAP}{_escaped(end)}/"
                kinds[k] += f"{' unmarked_0*' if parallel else ''} END_{k}"
        self._rules["TAIL"] = f"/{_GAP}\\}}/"
        return " | ".join(kinds)

    def _call(self, form: ToolFormat, function: FunctionDefinition) -> str:
        before, _, after = form.call.partition("NAME")  # the name itself may hold either word
        between, _, rest = after.partition("ARGUMENTS")
        arguments = _ARGUMENTS[form.style](self, _parameters(function))
        return self._text(f"{before}{function.name}{between}", arguments, rest)

    def _text(self, *parts: str) -> str:
        """Return texts, in the odd places expressions, as one expression."""
        out = [part if i % 2 else self._literal(part) for i, part in enumerate(parts)]
        return " ".join(filter(None, out))

    def _literal(self, text: str) -> str:
        pieces = self._cut.split(text) if self._cut else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def _json_arguments(self, schema: Schema) -> str:
        return json_value({"type": "object"} | dict(schema))

    def _python_arguments(self, schema: Schema) -> str:
        return self._fields(schema, lambda name, value: self._text(f"{name}=", json_value(value)), ", ")

    @property
    def _line(self) -> str:
        return "\n" if self._form.lines else ""

    def _xml_arguments(self, schema: Schema) -> str:
        return self._fields(schema, self._xml_field, "")

    def _xml_field(self, name: str, schema: Schema) -> str:
        values = " | ".join(self._xml_values(schema))
        return self._text(f"<parameter={name}>{self._line}", f"({values})")

    def _xml_values(self, schema: Schema) -> list[str]:
        """Return the spellings of a parameter's value, up to the next line. Texts stand as they are, of any length."""
        end = f"{self._line}</parameter>\n"
        if "enum" in schema:
            values = [value if isinstance(value, str) else json.dumps(value) for value in schema["enum"]]
            return [self._literal(f"{value}{end}") for value in values]
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            return [value for one in options for value in self._xml_values(_with_definitions(one, schema))]
        if "string" not in json_types(schema):
            return [self._text("", json_value(schema), end)]
        rule = f"text_{len(self._rules)}"
        self._rules[f"{rule}[suffix={json.dumps(end)}]"] = ANY
        return [rule]

    def _gemma_arguments(self, schema: Schema) -> str:
        return self._fields(schema, lambda name, value: self._text(f"{name}:", self._gemma_value(value)), ",")

    def _gemma_value(self, schema: Schema) -> str:
        quote = '<|"|>'
        options = schema.get("anyOf") or schema.get("oneOf")
        kind = schema.get("type")
        if "enum" in schema:
            values = (self._text(f"{quote}{v}{quote}") if isinstance(v, str) else json_value({"const": v})
                      for v in schema["enum"])  # fmt: skip
            return f"({' | '.join(values)})"
        if options:
            return f"({' | '.join(self._gemma_value(_with_definitions(option, schema)) for option in options)})"
        if kind == "string":
            return f"({self._text(quote, 'TEXT', quote)})"
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._gemma_value(_with_definitions(schema["items"], schema))
            return self._text("[", f'({item} ("," {item})*)?', "]")
        if kind == "object" and schema.get("properties"):
            return self._text("{", self._gemma_arguments(schema), "}")
        if kind in ("integer", "number", "boolean", "null"):
            return json_value(schema)
        raise invalid(
            f"a function's parameter {json.dumps(schema)[:80]} can't be required in the format of this chat template: "
            "give it a simple type, or leave out strict and tool_choice",
            "tools",
        )

    def _fields(self, schema: Schema, field: Callable[[str, Schema], str], separator: str) -> str:
        """Return the fields of an object: the required ones, then any of the others, in the schema's order."""
        fields = schema.get("properties") or {}
        if not isinstance(fields, Mapping) or not all(isinstance(value, Mapping) for value in fields.values()):
            raise invalid("tools: a function's parameters must be a JSON schema of an object", "tools")
        for name in fields:
            if not _READABLE[self._form.style].fullmatch(name):
                raise invalid(
                    f"tools: the format of this chat template has no spelling for the parameter {json.dumps(name)}: "
                    "rename it, or leave out strict and tool_choice",
                    "tools",
                )
        by_name = {name: field(name, _with_definitions(value, schema)) for name, value in fields.items()}
        needed = [by_name[name] for name in by_name if name in (schema.get("required") or ())]
        others = [by_name[name] for name in by_name if name not in (schema.get("required") or ())]
        return f"({_sequence(needed, others, json.dumps(separator) if separator else '')})"


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    return dict(function.parameters or {**NO_PARAMETERS, "additionalProperties": False})


def _free(form: ToolFormat) -> str:
    """Return any text, but none that begins with what is read as a call."""
    marks = "|".join(_escaped(begin) for begin, _ in form.unmarked)
    call = f'({marks}){_LIST_GAP}\\{{{_GAP}"({"|".join(CALL_KEYS)})"'
    return f"{ANY} & ~/{_GAP}{call}(.|\\n)*/" if form.unmarked else ANY


def _escaped(text: str) -> str:
    """Return text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def _sequence(needed: Sequence[str], others: Sequence[str], separator: str) -> str:
    """Return all `needed`, then any of `others`, with the separator between two."""
    more = "".join(f" ({separator} {other})?" for other in others)
    if needed or not separator:
        return f" {separator} ".join(needed) + more or '""'
    starts = (_sequence([other], others[i + 1 :], separator) for i, other in enumerate(others))
    return " | ".join(['""', *starts])


def _with_definitions(schema: Any, parent: Schema) -> Schema:
    return {**schema, **{key: parent[key] for key in ("$defs", "definitions") if key in parent}}


_ARGUMENTS: Mapping[Style, Callable[[_Writer, Schema], str]] = {
    "json": _Writer._json_arguments,
    "harmony": _Writer._json_arguments,
    "python": _Writer._python_arguments,
    "xml": _Writer._xml_arguments,
    "gemma": _Writer._gemma_arguments,
}
