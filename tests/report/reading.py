"""Reads a page as a person and as a browser would."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "path", "rect", "circle", "use", "line"}


def words(html: str) -> str:
    """The page's text as a person reads it."""
    body = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def section(html: str, name: str) -> str:
    """The text of one section of the page."""
    start = html.index(f'<section id="{name}">')
    end = html.find("<section id=", start + 1)
    return words(html[start : end if end > 0 else None])


class Elements(HTMLParser):
    """Collects elements, and fails where one is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def elements(html: str) -> Elements:
    parser = Elements()
    parser.feed(html)
    parser.close()
    return parser
