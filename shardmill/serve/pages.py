"""What a browser is served: the page to chat with, which is files of this package, and the list of addresses.

No file names an address outside the server, and the policy that goes with each keeps a browser from any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shardmill import __version__

Json = dict[str, Any]
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FOLDER = "/page"  # address of the page's parts, which are files of the folder of that name
POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # What is written into the page as HTML must come through DOMPurify, and scripts from this server.
    "require-trusted-types-for 'script'; trusted-types dompurify page"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a newer version of shardmill may serve at the same address
}


@cache
def page_files() -> Mapping[str, bytes]:
    """Return the page and its parts by their addresses."""
    contents = {one.name: one.read_bytes() for one in files("shardmill.serve").joinpath("page").iterdir()}
    return {"/": contents.pop("index.html")} | {f"{FOLDER}/{name}": text for name, text in contents.items()}


def page_at(path: str) -> Response | None:
    """Return what a browser is served at a path; None if that is no part of the page."""
    content = page_files().get(path)
    kind = KINDS["html" if path == "/" else path.rpartition(".")[2]] if content is not None else ""
    return None if content is None else Response(content, headers=HEADERS, media_type=f"{kind}; charset=utf-8")


def is_open(path: str) -> bool:
    """Return whether a path needs no key: a load balancer has none, and a browser can't send one for a page."""
    return path in ("/health", "/docs", "/openapi.json") or path in page_files()


def add_browser_pages(app: FastAPI, *, locked: bool) -> None:
    """Add the page to chat with, /openapi.json and /docs, which say what the application's routes take.

    Args:
        app: the application.
        locked: whether clients need a key.
    """
    described = cache(lambda: _describe(app, locked=locked))  # takes half a second, so it is made when it is asked for

    async def page(request: Request) -> Response:
        response = page_at(request.scope["path"])
        assert response is not None
        return response

    async def openapi(_: Request) -> Response:
        return Response(json.dumps(described()).encode(), headers=HEADERS, media_type="application/json")

    async def docs(_: Request) -> Response:
        return Response(_list_addresses(described()), headers=HEADERS, media_type="text/html; charset=utf-8")

    for path in page_files():
        app.add_route(path, page, include_in_schema=False)
    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.add_route("/docs", docs, include_in_schema=False)


ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _describe(app: FastAPI, *, locked: bool) -> Json:
    """Return what an application's routes take as an OpenAPI description.

    FastAPI would describe errors as its own, and every address by HEAD too.

    Args:
        app: the application.
        locked: whether clients need a key.
    """
    routes = []
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            shown = copy(route)
            shown.methods = (route.methods or set()) - {"HEAD"}
            routes.append(shown)
    description = get_openapi(title="shardmill", version=__version__, routes=routes)
    for name in ("HTTPValidationError", "ValidationError"):
        description.get("components", {}).get("schemas", {}).pop(name, None)
    parts = description.setdefault("components", {})
    parts.setdefault("schemas", {})["Error"] = ERROR
    error = {
        "description": "An error in OpenAI's form",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for path, operations in description["paths"].items():
        for operation in operations.values():
            operation["responses"] = {"200": {"description": "The answer"}, "default": error}
            if locked and not is_open(path):
                operation["security"] = [{"key": []}]
    if locked:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return description


DOCS = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{css}">
<title>Addresses · shardmill</title>
<body class="docs">
<main>
<h1>What this server answers</h1>
<p>Requests are JSON. The same as an OpenAPI description: <a href="openapi.json">openapi.json</a>.</p>
{addresses}
<h2>Objects</h2>
{objects}
</main>
"""


def _list_addresses(described: Json) -> str:
    """Return /docs: a plain list of the addresses of an OpenAPI description, and of what they take."""
    shown = "".join(
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
        f"{''.join(_body(operation))}"
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    )
    objects = "".join(
        f'<h3 id="{escape(name)}">{escape(name)}</h3>{_fields(schema)}'
        for name, schema in described["components"]["schemas"].items()
    )
    return DOCS.format(addresses=shown, objects=objects, css=f"{FOLDER}/page.css".lstrip("/"))


def _body(operation: Json) -> Iterator[str]:
    """Yield the line that says what a request's body is."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield f"<p>Takes {_type(content['schema'])}.</p>"


def _fields(schema: Json) -> str:
    """Return a table of an object's fields."""
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code></th><td>{_type(field)}</td>"
        f"<td>{'required' if name in needed else ''}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<p>{escape(schema.get('description', ''))}</p><table>{rows}</table>"


def _type(schema: Json) -> str:
    """Return what values a schema allows, in words; other objects are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(
            f"<code>{escape(json.dumps(one))}</code>" for one in schema.get("enum", [schema.get("const")])
        )
    if schema.get("type") == "array":
        return f"a list of {_type(schema.get('items', {}))}"
    kind = schema.get("type", "anything")
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)
