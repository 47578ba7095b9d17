"""Prefixes of earlier texts: copies of what an engine's slots held, found again by their tokens.

A text is cut into blocks of `BLOCK` tokens, and each block follows the block before it. So texts that begin alike share
the blocks of their beginning, and all blocks form a tree, as in the prefix caching of vLLM and SGLang. A block is a
copy of the slots of its positions.

Some models also keep a rest, see `decode.engine.Engine`. They can only go on where the rest was copied: at an end. An
end follows a block, and has the text's tokens after that block.

Copies have a budget of bytes. Copies that were not used for the longest time are freed first, the end of a text before
its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path

from drafted_decoding.engine import Engine

BLOCK = 32  # tokens


@dataclass(eq=False)
class Node:
    """A copy: a block, or the end of a text with the rest, which has fewer tokens than a block.

    Attributes:
        key: the engine's key of the copy.
        tokens: its tokens.
        parent: the block before it, or a root.
        bytes: its size.
        children: the copies after it, by their tokens.
    """

    key: int
    tokens: tuple[int, ...]
    parent: Node | None
    bytes: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)

    def enter(self, size: int) -> None:
        """Stand in the tree, with a copy of `size` bytes."""
        self.bytes = size
        if self.parent is not None:
            self.parent.children[self.tokens] = self

    def leave(self) -> None:
        """Leave the tree."""
        if self.parent is not None:
            del self.parent.children[self.tokens]


@dataclass(frozen=True)
class Found:
    """The kept beginning of a text.

    Attributes:
        length: how many of its tokens can be recalled.
        nodes: the copies with these tokens, in order.
        known: tokens of its blocks, which may be more: for a model with a rest, blocks alone can't be recalled.
    """

    length: int
    nodes: tuple[Node, ...]
    known: int


class PrefixCache:
    """The kept prefixes of one engine.

    Args:
        engine: the engine, which holds the copies.
        budget: the most bytes of all copies.

    Attributes:
        bytes: bytes of all copies now.
        hits: how often a prefix was recalled.
        recalled: tokens that were recalled.
        evicted: copies that were freed for others.
    """

    def __init__(self, engine: Engine, budget: int) -> None:
        self._engine = engine
        self._budget = budget
        self._keys = count(1)
        self._roots: dict[str, Node] = {}
        self._used: OrderedDict[int, Node] = OrderedDict()  # the least recently used first
        self.bytes = self.hits = self.recalled = self.evicted = 0

    @cached_property
    def whole(self) -> bool:
        """Return whether the model keeps a rest, so that only whole copies can be recalled."""
        return self._engine.copy_bytes()[1] > 0

    def find(self, tokens: Sequence[int], namespace: str = "") -> Found:
        """Return the longest kept beginning of a text in a namespace."""
        blocks = self._blocks(tokens, namespace)
        known = BLOCK * len(blocks)
        if not self.whole:
            return Found(known, tuple(blocks), known)
        best = Found(0, (), known)
        for depth, node in enumerate([self._root(namespace), *blocks]):
            for end in (one for one in node.children.values() if len(one.tokens) < BLOCK):
                length = BLOCK * depth + len(end.tokens)
                if length > best.length and tuple(tokens[BLOCK * depth : length]) == end.tokens:
                    best = Found(length, (*blocks[:depth], end), known)
        return best

    def recall(self, beginning: Found, filled: int) -> None:
        """Write a kept beginning into the slots, whose first `filled` positions hold its first tokens already."""
        self._touch(beginning.nodes)
        self._engine.copy_in([node.key for node in beginning.nodes[filled // BLOCK :]])
        self.hits += 1
        self.recalled += beginning.length - filled

    def keep(self, tokens: Sequence[int], namespace: str = "") -> None:
        """Copy what the slots hold of a text, as far as it is not kept already and the budget allows."""
        position, rest = self._engine.copy_bytes()
        known = self._blocks(tokens, namespace)
        parts = [tuple(tokens[at : at + BLOCK]) for at in range(BLOCK * len(known), len(tokens), BLOCK)]
        end = parts.pop() if parts and len(parts[-1]) < BLOCK else ()
        last = known[-1] if known else self._root(namespace)
        if rest and not parts and end in last.children:
            known.append(last.children[end])
        elif rest:
            parts.append(end)
        self._touch(known)
        room = self._budget - sum(node.bytes for node in known)
        if not rest:
            parts = parts[: room // (BLOCK * position)]
        size = position * sum(map(len, parts)) + rest
        if not parts or size > room:
            return
        self._make_room(size)
        new = self._chain(parts, last)
        spans: dict[int, tuple[int, int]] = {}
        at = BLOCK * len(known)
        for node in new:
            spans[node.key] = (at, at + len(node.tokens))
            at += len(node.tokens)
        self._enter(new, self._engine.copy_out(spans, new[-1].key if rest else None))
        self._touch([*known, *new])
        self._make_room(0)  # the size was an estimate

    def save(self, tokens: Sequence[int], file: Path) -> None:
        """Write a kept text to a file for `load`; nothing if the budget was too small for the whole text."""
        nodes = self.find(tokens).nodes
        if [node.tokens for node in nodes] == self._parts(tokens):
            self._engine.save_copies([node.key for node in nodes], file, tokens)

    def load(self, tokens: Sequence[int], file: Path) -> None:
        """Read a text that an earlier process has saved; nothing may be kept yet.

        Raises any exception if that is not possible; then nothing is kept.
        """
        new = self._chain(self._parts(tokens), self._root(""))
        sizes = self._engine.load_copies([node.key for node in new], file, tokens)
        self._enter(new, sizes)
        self._touch(new)
        self._make_room(0)

    def _parts(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens of the copies of a whole text."""
        whole = len(tokens) // BLOCK * BLOCK
        parts = [tuple(tokens[at : at + BLOCK]) for at in range(0, whole, BLOCK)]
        return [*parts, tuple(tokens[whole:])] if self.whole else parts

    def _chain(self, parts: Sequence[tuple[int, ...]], last: Node) -> list[Node]:
        """Return nodes for copies that follow each other after `last`; they do not stand in the tree yet."""
        new: list[Node] = []
        for part in parts:
            last = Node(next(self._keys), part, last)
            new.append(last)
        return new

    def _enter(self, nodes: Sequence[Node], sizes: Mapping[int, int]) -> None:
        """Put nodes with copies of these sizes into the tree."""
        for node in nodes:
            node.enter(sizes[node.key])
            self._used[node.key] = node
            self.bytes += node.bytes

    def clear(self) -> None:
        """Free all copies."""
        self._free(list(self._used.values()))

    def _root(self, namespace: str) -> Node:
        return self._roots.setdefault(namespace, Node(0, (), None))

    def _blocks(self, tokens: Sequence[int], namespace: str) -> list[Node]:
        """Return the kept blocks of a text, in order."""
        nodes: list[Node] = []
        node: Node | None = self._root(namespace)
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = node.children.get(tuple(tokens[at : at + BLOCK])) if node else None
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _touch(self, nodes: Sequence[Node]) -> None:
        """Mark copies as used, a parent after its children, so that it is freed later."""
        for node in reversed(nodes):
            self._used.move_to_end(node.key)

    def _make_room(self, size: int) -> None:
        """Free the copies that were not used for the longest time, until `size` bytes fit into the budget."""
        freed: list[Node] = []
        excess = self.bytes + size - self._budget
        for node in self._used.values():
            if excess <= 0:
                break
            excess -= node.bytes
            freed.append(node)
        self.evicted += len(freed)
        self._free(freed)

    def _free(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.leave()
            del self._used[node.key]
            self.bytes -= node.bytes
        if nodes:
            self._engine.drop_copies([node.key for node in nodes])
