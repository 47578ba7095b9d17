"""Grammars of answers without calls: a JSON value of a schema, a text that a regular expression matches, or a choice.

The grammars are in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardmill.serve.protocol import invalid

Schema = Mapping[str, Any]
ANY = "/(.|\\n)*/"
TRAINED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write arguments
COMPACT = {"whitespace_flexible": False}


def write_answer(answer: str, thought_end: str, special: Mapping[str, int]) -> str:
    """Return the grammar of an answer without calls, after the rest of a thought if `thought_end` ends one.

    Args:
        answer: the answer's expression.
        thought_end: the text that ends the thought that the prompt has opened; empty if it has opened none.
        special: text -> token, for the tokens that text in a grammar does not match.
    """
    if not thought_end:
        return whole_grammar(answer, {})
    thought, rules = opened_thought(thought_end, special)
    return whole_grammar(f"{thought} /\\n*/ ({answer})", rules)


def regex_answer(regex: str) -> str:
    """Return the expression of a text that a regular expression matches as a whole."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    return f"/{escaped}/"


def choice_answer(choices: Sequence[str]) -> str:
    """Return the expression of one of several texts."""
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def json_value(schema: Schema, layout: Mapping[str, Any] = TRAINED) -> str:
    """Return the expression of a JSON value that conforms to a schema, and in which nothing is invented."""
    return f"%json {json.dumps({**closed(schema), 'x-guidance': layout})}"


def whole_grammar(start: str, rules: Mapping[str, str]) -> str:
    """Return a grammar, given its first expression and its rules by their names."""
    return "\n".join(["%llguidance {}", f"start: {start}", *(f"{name}: {rule}" for name, rule in rules.items())]) + "\n"


def opened_thought(end: str, special: Mapping[str, int]) -> tuple[str, dict[str, str]]:
    """Return the rest of a thought up to its first mark `end`: an expression, and the rules that it needs."""
    if end in special:
        return f"TEXT <[{special[end]}]>", {"TEXT": ANY}
    return "opened", {f"opened[suffix={json.dumps(end)}]": ANY}


_SCHEMA = frozenset({"items", "contains", "additionalProperties"})  # keywords whose value is a schema
_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})  # or a list of schemas
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # or schemas by name
_ALTERNATIVES = frozenset({"allOf", "anyOf", "oneOf"})  # which describe the same value as the schema around them
_DESCRIBING = ("properties", "$ref", "anyOf", "oneOf", "if", "dependentSchemas")
_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")  # what else an object may hold


def closed(schema: Schema) -> dict[str, Any]:
    """Return a schema whose objects take no invented properties, unless it says what else they may hold.

    By JSON Schema an object that names its properties may have any others, and then models invent some; llama.cpp's
    grammars forbid them, too. An object without named properties stays open, and so does an object that several
    schemas describe together, since none of them names all of its properties.

    Raises:
        ApiError: the schema is nested too deeply.
    """
    shared: set[str] = set()  # references to definitions that describe an object together with another schema

    def walk(value: Any, place: str = "", *, together: bool = False) -> Any:
        if not isinstance(value, Mapping):
            return value
        together = together or _describing(value) > 1 or place in shared
        if together and isinstance(value.get("$ref"), str):
            shared.add(value["$ref"])
        mapped = _mapped(
            value, lambda key, part: walk(part, f"{place}/{key}", together=together and key in _ALTERNATIVES)
        )
        return mapped if together or not _names_all(value) else {**mapped, "additionalProperties": False}

    while True:  # a definition may come before the schema that shares it
        before = len(shared)
        try:
            narrowed: dict[str, Any] = walk(schema, "#")
        except RecursionError:
            raise invalid("a JSON schema is nested too deeply: flatten it by $defs") from None
        if len(shared) == before:
            return narrowed


def _describing(value: Schema) -> int:
    """Return how many schemas describe a value together."""
    parts = value.get("allOf")
    return sum(key in value for key in _DESCRIBING) + (len(parts) if isinstance(parts, list) else 0)


def _names_all(value: Schema) -> bool:
    """Return whether a schema names properties and does not say what else there may be."""
    named, needed = value.get("properties"), value.get("required") or ()
    if not isinstance(named, Mapping) or any(key in value for key in _OTHERS):
        return False
    return isinstance(needed, Sequence) and all(str(name) in named for name in needed)  # otherwise nothing would fit


def _mapped(value: Schema, change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a schema with its own schemas changed, given their place in it and themselves."""
    out: dict[str, Any] = {}
    for key, part in value.items():
        if key in _BY_NAME and isinstance(part, Mapping):
            out[key] = {name: change(f"{key}/{name}", one) for name, one in part.items()}
        elif key in _SCHEMAS and isinstance(part, list):
            out[key] = [change(key, one) for one in part]
        else:
            out[key] = change(key, part) if key in _SCHEMA else part
    return out
