"""The tokenizers that the Swift package reads give the same tokens and texts as the package `tokenizers`."""

import importlib.util
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "swift" / "scripts" / "made_tokenizers.py"
SWIFT = "SHARDMILL_SWIFT"  # a folder with `swift` and `swift-exec`
FURTHER = "SHARDMILL_TOKENIZERS"  # more tokenizer.json files to compare, separated by ":"
TEXTS = 2000


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("made_tokenizers", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = _script()
RECORDED = json.loads(maker.VECTORS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("today", [*maker.cases(RECORDED[0]["texts"])], ids=lambda case: case["name"])
def test_recorded_tokenizers_are_those_of_today(today: dict[str, Any]) -> None:
    assert today in RECORDED


def test_every_kind_is_recorded() -> None:
    assert [case["name"] for case in RECORDED] == [*maker.KINDS]


@cache
def command() -> list[str] | None:
    """Build shardmill-check in release and return the command that runs it; None if there is no Swift."""
    folder = os.environ.get(SWIFT)
    swift = str(Path(folder, "swift")) if folder else shutil.which("swift")
    if swift is None:
        return None
    build = [swift, "build", "-c", "release", "--product", "shardmill-check"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    program = str(ROOT / ".build" / "release" / "shardmill-check")
    return [str(Path(folder, "swift-exec")), program] if folder else [program]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*maker.KINDS, "demo", *filter(None, os.environ.get(FURTHER, "").split(":"))])
def test_swift_gives_the_same_tokens_and_texts(name: str, tmp_path: Path) -> None:
    check = command()
    if check is None:
        pytest.skip(f"there is no swift: install it, or set {SWIFT}")
    file = ROOT / "resources" / "demo" / "tokenizer.json" if name == "demo" else Path(name)
    if name in maker.KINDS:
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(maker.made(name), ensure_ascii=False), encoding="utf-8")
    texts = list(maker.nasty_texts(TEXTS))
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    given = ["tokenize", str(file), str(tmp_path / "texts.json"), str(tmp_path / "result.json")]
    subprocess.run([*check, *given], check=True, capture_output=True, timeout=PATIENCE)
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids for text in texts]
    other = [text for text, ours, theirs in zip(texts, found["ids"], ids, strict=True) if ours != theirs]
    assert other == []
    assert found["texts"] == [tokenizer.decode(one, skip_special_tokens=False) for one in ids]
