"""Write prompts of a chat as JSON Lines, for `shardmill draft train`.

    python lab/chat_prompts.py WIKITEXT/valid.txt PROMPTS.jsonl [--count 3000]

Two of five prompts are about documented functions of the standard library of the Python that runs this: to write,
explain, document or test them. The others are about what the articles of a text in WikiText-2's form name.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__", "lib2to3", "idlelib"}
CODE = (
    "Write a Python function that does this: {doc}",
    "Write a Python function `{name}`. {doc}",
    "How can I do this in Python? {doc}",
    "Explain what this Python code does:\n\n```python\n{body}\n```",
    "Add type hints and comments to this function:\n\n```python\n{body}\n```",
    "Write unit tests for this function:\n\n```python\n{body}\n```",
    "Is there a bug in this code?\n\n```python\n{body}\n```",
    "What is the module {module} of Python for? Give an example.",
)
WORDS = (
    "Tell me about {thing}.",
    "What is {thing}?",
    "What are the most important facts about {thing}?",
    "Write a short story about {thing}.",
    "Write a poem about {thing}.",
    "Write an email to a friend about {thing}.",
    "Give me five tips for somebody who wants to learn about {thing}.",
    "Explain {thing} to a child.",
    "What are the pros and cons of {thing}?",
    "How do I start with {thing}? Answer step by step.",
    "Compare {thing} and {other}.",
    "Make a list of ten things that have to do with {thing}.",
    "Why do people care about {thing}?",
    "Summarize this text:\n\n{text}",
    "Rewrite this in simpler words: {sentence}",
    "Ask three questions about this text and answer them:\n\n{text}",
    "Is this sentence positive, negative or neutral? {sentence}",
    "Continue this story: {sentence}",
    "Plan a presentation about {thing}.",
    "What would happen without {thing}?",
    "Give me a recipe that reminds of {thing}.",
    "Can you recommend books or films about {thing}?",
)


def functions() -> Iterator[dict[str, str]]:
    """Yield short documented functions of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                body = ast.get_source_segment(source, node) or ""
                if len(doc) < 300 and len(body) < 500:
                    yield {"name": node.name, "doc": doc, "body": body, "module": path.stem}


def running(text: str) -> str:
    """Return tokens of WikiText as running text."""
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]'%])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text).replace(' " ', ' "').strip()


def prompts(text: str, count: int) -> Iterator[str]:
    """Yield prompts, drawn with a fixed seed."""
    draw, code = random.Random(0), list(functions())
    paragraphs = [running(one) for one in text.split("\n") if len(one) > 200]
    pieces = [piece for one in paragraphs for piece in re.split(r"(?<=[.!?]) ", one)]
    sentences = [piece for piece in pieces if 60 < len(piece) < 250 and "<unk>" not in piece]
    texts = [one[:500].rpartition(".")[0] + "." for one in paragraphs]
    texts = [one for one in texts if "<unk>" not in one and len(one) > 150]
    names = {name for one in paragraphs for name in re.findall(r"(?<=[a-z,] )(?:[A-Z][a-z]+ ){1,3}[A-Z][a-z]+", one)}
    common = re.findall(r"\b(?:the|a|of|in|and) ([a-z]{4,}(?: [a-z]{5,}s)?)\b", " ".join(paragraphs))
    things = sorted(names) + sorted(set(common))
    for number in range(count):
        if number % 5 < 2:
            yield draw.choice(CODE).format(**draw.choice(code))
            continue
        form, thing, other = draw.choice(WORDS), draw.choice(things), draw.choice(things)
        yield form.format(thing=thing, other=other, text=draw.choice(texts), sentence=draw.choice(sentences))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=3000)
    args = parser.parse_args(arguments)
    lines = (json.dumps({"prompt": one}) + "\n" for one in prompts(args.text.read_text(encoding="utf-8"), args.count))
    args.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
