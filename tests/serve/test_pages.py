"""What a browser is served: parts that are small, closed to others and whose they should be; and the description."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest

from shardmill.serve.http import ENDPOINTS
from shardmill.serve.model import Settings
from shardmill.serve.pages import POLICY, page_at, page_files

from .fake import fake_model
from .running import Running, running

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model()) as up:
        yield up


def test_the_page_is_small_and_names_nobody_else() -> None:
    files = page_files()
    assert sum(map(len, files.values())) < 200_000
    own = [name for name in files if name not in ("/page/marked.esm.js", "/page/purify.min.js")]
    assert len(own) == 5 and not [name for name in own if b"://" in files[name]]


def test_every_part_is_served_under_the_policy(server: Running) -> None:
    """Without a key, by GET and HEAD; no part can be framed, and nothing beside the parts can be had."""
    for path in [*page_files(), "/docs", "/openapi.json"]:
        status, headers, body = server.request("GET", path)
        assert (status, headers["content-security-policy"]) == (200, POLICY) and body, path
        assert headers["x-content-type-options"] == "nosniff"
        assert server.request("HEAD", path)[::2] == (200, b"")
    assert "frame-ancestors 'none'" in POLICY and "unsafe" not in POLICY
    for path in ("/page", "/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/redoc"):
        assert server.request("GET", path)[0] == 404, path
    assert page_at("/v1/models") is None


@pytest.mark.parametrize("locked", [False, True])
def test_the_description_has_every_address_and_what_it_takes(locked: bool) -> None:
    with running(fake_model(), Settings(port=0, api_key="secret" if locked else None)) as up:
        described = json.loads(up.request("GET", "/openapi.json")[2])
        page = up.request("GET", "/docs")[2].decode()
    posts = {path for path, methods in described["paths"].items() if "post" in methods}
    gets = {path.removesuffix("/{name}") for path, methods in described["paths"].items() if "get" in methods}
    encoders, pages = {"/v1/label", "/v1/embeddings", "/v1/rerank"}, {"/", "/page", "/docs", "/openapi.json"}
    assert posts | gets == {*ENDPOINTS} - encoders - pages
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = {found.rpartition("/")[2] for found in re.findall(r'"\$ref": "([^"]+)"', json.dumps(described))}
    assert named <= schemas.keys() and not {"HTTPValidationError", "ValidationError"} & schemas.keys()
    chat = {"components": described["components"], **schemas["ChatRequest"]}
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    jsonschema.validate(asked, chat)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(asked | {"temperature": 3}, chat)
    asks = {path: "security" in one for path, methods in described["paths"].items() for one in methods.values()}
    assert asks == {path: locked and path != "/health" for path in asks}
    for path in described["paths"]:
        assert path in page
    assert page.count("<script") == 0


@pytest.fixture(scope="module")
def vendor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor", ROOT / "tools/vendor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def test_the_libraries_of_others_are_those_of_the_table_and_in_notice(vendor: ModuleType) -> None:
    """`python tools/vendor.py --check`, which CI runs, compares the table with what npm has."""
    notice = (ROOT / "NOTICE").read_text()
    assert len(vendor.PAGES) == 2
    for library in vendor.PAGES:
        file = vendor.PAGE / Path(library.file).name
        assert sha256(file.read_bytes()).hexdigest() == library.sha256
        named = notice.partition(f"\n{file.relative_to(ROOT)}\n")[2].partition("\n\n")[0]
        assert f" {library.version} (" in named and f"{library.file} of its package" in named.replace("\n    ", " ")
