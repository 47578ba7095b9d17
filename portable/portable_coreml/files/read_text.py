"""Reads MIL text (the `model.mil` of a compiled bundle) into the intermediate representation.

Reads both dialects that write_text.py writes. Text that is damaged raises ProgramError with the line it is on;
nesting and literal sizes are bounded, so no input takes more than a little time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import EllipsisType
from typing import TypeVar

import numpy as np

from portable_coreml import program as ir
from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ProgramError
from portable_coreml.files.read_proto import MAX_NESTING, MAX_RANK, element_count
from portable_coreml.files.write_text import OPSETS

TARGETS = {tag: name for name, tag in OPSETS.items()}

_TOKEN = re.compile(
    r"""\s*( "(?:[^"\\]|\\.)*"                            # string
          | -> | \.\.\.
          | [-+]? (?: 0x[0-9a-fA-F.]+p[-+]?\d+ | inf | nan | \d[\d.]* (?: e[-+]?\d+ )? ) \b  # number
          | [A-Za-z_@][\w.@/$]*                         # name
          | [\[\](){}<>,;=?] )""",
    re.VERBOSE,
)
_Item = TypeVar("_Item")
_UNESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class _Scanner:
    """A text with one token of look-ahead, and the small constructs that all larger constructs share."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.token = ""
        self.advance()

    def fail(self, what: str) -> ProgramError:
        line = self.text.count("\n", 0, self.at) + 1
        return ProgramError(f"model.mil, line {line}: {what}, found {self.token[:40]!r}")

    def advance(self) -> str:
        taken = self.token
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            if self.text[self.at :].strip():
                raise self.fail("unreadable text")
            self.token = ""
        else:
            self.token, self.at = match.group(1), match.end()
        return taken

    def expect(self, token: str) -> None:
        if self.token != token:
            raise self.fail(f"expected {token!r}")
        self.advance()

    def accept(self, token: str) -> bool:
        if self.token != token:
            return False
        self.advance()
        return True

    def name(self) -> str:
        if not self.token or not (self.token[0].isalpha() or self.token[0] in "_@"):
            raise self.fail("expected a name")
        return self.advance()

    def string(self) -> str:
        if not self.token.startswith('"'):
            raise self.fail("expected a string")
        body = self.advance()[1:-1]
        return re.sub(r"\\(.)", lambda m: _UNESCAPES.get(m.group(1), m.group(1)), body) if "\\" in body else body

    def integer(self) -> int:
        try:
            number = int(self.token)
        except ValueError:
            raise self.fail("expected an integer") from None
        self.advance()
        return number

    def several(self, read: Callable[[], _Item], close: str) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while not self.accept(close):
            if items:
                self.expect(",")
            items.append(read())
        return tuple(items)

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise self.fail(f"more than {MAX_NESTING} levels of nesting")


def read_text(text: str) -> ir.Program:
    """Return the program in MIL text. Raises ProgramError."""
    return _Reader(text).program()


class _Reader(_Scanner):
    """A recursive-descent parser: one method per construct."""

    def program(self) -> ir.Program:
        self.expect("program")
        self.expect("(")
        version = self.advance()
        self.expect(")")
        attributes = self.attributes()
        self.expect("{")
        functions: dict[str, ir.Function] = {}
        while not self.accept("}"):
            function = self.function()
            if function.name in functions:
                raise self.fail(f"function '{function.name}' is defined twice")
            functions[function.name] = function
        if self.token or not functions:
            raise self.fail("expected the end of the program" if functions else "expected a function")
        return ir.Program(functions, attributes, version)

    def function(self) -> ir.Function:
        self.expect("func")
        name = self.name()
        self.expect("<")
        tag = self.name()
        self.expect(">")
        self.expect("(")
        inputs = self.several(self.named, ")")
        attributes = self.attributes()
        self.expect("{")
        block = self.block(())
        self.expect(";")
        return ir.Function(name, inputs, TARGETS.get(tag, tag), block, attributes)

    def block(self, inputs: tuple[ir.Named, ...]) -> ir.Block:
        """Return operations and results of a block whose opening brace was read."""
        self.nest()
        ops: list[ir.Op] = []
        while not self.accept("}"):
            ops.append(self.op())
        self.expect("->")
        self.expect("(")
        outputs = self.several(self.name, ")")
        self.depth -= 1
        return ir.Block(tuple(ops), outputs, inputs)

    def op(self) -> ir.Op:
        outputs: list[ir.Named] = []
        kind = ""
        while not kind:
            start, token = self.at, self.token
            first = self.name()
            if self.token == "(":  # an operation without results
                kind = first
                break
            self.at, self.token = start, token
            outputs.append(self.named())
            if not self.accept(","):
                self.expect("=")
                kind = self.name()
        self.expect("(")
        pairs = self.several(self.pair, ")")
        attributes = self.attributes()
        blocks: list[ir.Block] = []
        while self.accept("("):
            inputs = self.several(self.named, ")")
            self.expect("{")
            blocks.append(self.block(inputs))
        self.expect(";")
        return ir.Op(kind, dict(pairs), tuple(outputs), attributes, tuple(blocks))

    def pair(self) -> tuple[str, tuple[ir.Binding, ...]]:
        key = self.name()
        self.expect("=")
        if self.accept("("):
            return key, self.several(self.binding, ")")
        return key, (self.binding(),)

    def binding(self) -> ir.Binding:
        start, token = self.at, self.token
        name = self.name()
        if self.token not in ("<", "("):
            return name
        self.at, self.token = start, token
        return self.value()

    def attributes(self) -> dict[str, ir.Value]:
        if not self.accept("["):
            return {}
        return dict(self.several(self.attribute, "]"))

    def attribute(self) -> tuple[str, ir.Value]:
        key = self.name()
        self.expect("=")
        return key, self.value()

    def named(self) -> ir.Named:
        kind = self.type()
        return ir.Named(self.name(), kind)

    def type(self) -> ir.Type:
        self.nest()
        word = self.name()
        kind = self._compound(word) if self.token == "<" else self._scalar(word)
        self.depth -= 1
        return kind

    def _scalar(self, word: str) -> ir.TensorType:
        if word not in BY_NAME:
            raise self.fail(f"unknown type '{word}'")
        return ir.TensorType(word)

    def _compound(self, word: str) -> ir.Type:
        self.expect("<")
        if word == "tensor":
            dtype = self._scalar(self.name()).dtype
            self.expect(",")
            self.expect("[")
            extents = self.several(self.extent, "]")
            self.expect(">")
            if len(extents) > MAX_RANK:
                raise self.fail(f"a tensor has rank {len(extents)}")
            return ir.TensorType(dtype, tuple(None if n is ... else n for n in extents), ... in extents)
        if word == "state":
            wrapped = self.type()
            self.expect(">")
            if not isinstance(wrapped, ir.TensorType):
                raise self.fail("a state must wrap a tensor")
            return ir.StateType(wrapped)
        if word == "list":
            element = self.type()
            self.expect(",")
            length = self.extent()
            if length is ...:
                raise self.fail("a list has one length")
            self.expect(">")
            return ir.ListType(element, length)
        elements = self.several(self.type, ">")
        if word == "dict" and len(elements) == 2:
            return ir.DictType(*elements)
        if word == "tuple":
            return ir.TupleType(elements)
        raise self.fail(f"unknown type '{word}'")

    def extent(self) -> int | EllipsisType | None:
        """Return an extent: a number, None for an unknown one, or an ellipsis for any number of unknown ones."""
        if self.accept("?"):
            return None
        if self.accept("..."):
            return ...
        number = self.integer()
        if number < 0:
            raise self.fail("a negative extent")
        return number

    def value(self) -> ir.Value:
        kind = self.type()
        self.expect("(")
        made = self.literal(kind)
        self.expect(")")
        return made

    def literal(self, kind: ir.Type) -> ir.Value:
        self.nest()
        made = self._literal(kind)
        self.depth -= 1
        return made

    def _literal(self, kind: ir.Type) -> ir.Value:
        if isinstance(kind, ir.TensorType):
            return ir.Value(kind, self.blob() if self.token == "BLOBFILE" else self.tensor(kind))
        if isinstance(kind, ir.DictType):
            self.expect("{")
            return ir.Value(kind, ir.Pairs(self.several(lambda: self.entry(kind), "}")))
        if isinstance(kind, ir.ListType):
            self.expect("[")
            return ir.Value(kind, self.several(lambda: self.literal(kind.element), "]"))
        if isinstance(kind, ir.TupleType):
            self.expect("(")
            return self.elements(kind)
        raise self.fail("a state has no literal")

    def elements(self, kind: ir.TupleType) -> ir.Value:
        """Read a tuple's elements, each of the type that `kind` declares, and the closing parenthesis."""
        items: list[ir.Value] = []
        while not self.accept(")"):
            if items:
                self.expect(",")
            if len(items) >= len(kind.elements):
                raise self.fail("a tuple with too many elements")
            items.append(self.literal(kind.elements[len(items)]))
        return ir.Value(kind, tuple(items))

    def entry(self, kind: ir.DictType) -> tuple[ir.Value, ir.Value]:
        self.expect("{")
        key = self.literal(kind.key)
        self.expect(",")
        value = self.literal(kind.value)
        self.expect("}")
        return key, value

    def blob(self) -> ir.Blob:
        self.advance()
        self.expect("(")
        parts = dict(self.several(self.attribute, ")"))
        path, offset = parts.get("path"), parts.get("offset")
        if (
            path is None
            or offset is None
            or not isinstance(path.data, np.ndarray)
            or not isinstance(offset.data, np.ndarray)
        ):
            raise self.fail("BLOBFILE needs path and offset")
        return ir.Blob(str(path.data[()]), int(offset.data[()]))

    def tensor(self, kind: ir.TensorType) -> np.ndarray:
        """Return the values of a tensor literal, brackets included, up to the closing parenthesis (which stays)."""
        open_shape = None in kind.shape
        count = None if open_shape else self.count(kind)
        flat: list[object] = []
        brackets = 0
        while self.token and (brackets or not flat) and self.token not in (")", "}"):
            if self.token == "[":
                brackets += 1
                self.advance()
                if brackets > MAX_RANK:
                    raise self.fail("too many brackets")
            elif self.token in ("]", ","):
                brackets -= self.token == "]"
                self.advance()
                if not brackets:
                    break
            else:
                flat.append(self.number(kind.dtype))
                if count is not None and len(flat) > count:
                    raise self.fail(f"more than the {count} values of {kind.dtype}{list(kind.shape)}")
        if count is not None and len(flat) != count:
            raise self.fail(f"{len(flat)} values for {kind.dtype}{list(kind.shape)}")
        shape = (len(flat),) if open_shape else tuple(d or 0 for d in kind.shape)
        return np.array(flat, BY_NAME[kind.dtype].numpy).reshape(shape)

    def count(self, kind: ir.TensorType) -> int:
        try:
            return element_count(kind)
        except ProgramError as error:
            raise self.fail(str(error)) from None

    def number(self, dtype: str) -> object:
        if dtype == "string":
            return self.string()
        try:
            if dtype == "bool":
                made: object = {"true": True, "false": False}[self.token]
            elif dtype in ("fp16", "fp32", "fp64"):
                made = float.fromhex(self.token) if "x" in self.token else float(self.token)
            else:
                made = BY_NAME[dtype].numpy.type(int(self.token))
        except (ValueError, KeyError, OverflowError):
            raise self.fail(f"expected a {dtype} value") from None
        self.advance()
        return made
