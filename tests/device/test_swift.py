"""The Swift package replays a device kit's recorded passes: here through the pipe, on a Mac on Core ML."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardmill.device.kit import write_kit

from .finished import finished
from .measuring import unpacked

ROOT = Path(__file__).parents[2]
SWIFT = "SHARDMILL_SWIFT"  # a folder with `swift` and `swift-exec`, as .ci/install-swift writes them
pytestmark = pytest.mark.slow


def serve(command: list[str], precision: str = "fp16", **options: Any) -> list[dict[str, Any]]:
    """Run a command on the portable engine, as swift/scripts/pipe_engine.py does, and return what it reported."""
    spec = importlib.util.spec_from_file_location("pipe_engine", ROOT / "swift" / "scripts" / "pipe_engine.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reports: list[dict[str, Any]] = module.serve(command, precision=precision, **options)
    return reports


@pytest.fixture(scope="module")
def command() -> list[str]:
    """The command that runs shardmill-check."""
    folder = os.environ.get(SWIFT)
    swift = str(Path(folder, "swift").resolve()) if folder else shutil.which("swift")
    if swift is None:
        pytest.skip(f"there is no swift: install it, or set {SWIFT}")
    subprocess.run([swift, "build", "-c", "release", "--product", "shardmill-check"], cwd=ROOT, check=True)
    program = str(ROOT / ".build" / "release" / "shardmill-check")
    return [str(Path(folder, "swift-exec").resolve()), program] if folder else [program]


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """An unpacked kit of a tiny model."""
    write_kit([finished(tmp_path / "finished")], tmp_path / "kit.zip")
    return unpacked(tmp_path / "kit.zip", tmp_path)


def test_a_kit_passes_through_the_pipe(command: list[str], kit: Path) -> None:
    reports = serve([*command, "replay", str(kit)])
    assert [report["passed"] for report in reports] == [True]
    result = json.loads((kit / "swift-result.json").read_text(encoding="utf-8"))
    variants = json.loads((kit / "kit.json").read_text(encoding="utf-8"))["variants"]
    assert [found["name"] for found in result["variants"]] == [variant["name"] for variant in variants]
    for found, variant in zip(result["variants"], variants, strict=True):
        assert {function["part"] for function in found["functions"]} == {part["name"] for part in variant["parts"]}
        for function in found["functions"]:
            assert [width["equal"] for width in function["widths"]] == [1.0] * len(function["widths"])
            assert function["firstPassSeconds"] > 0
            assert all(width["lastKept"] is not False for width in function["widths"])


def test_a_changed_weight_fails(command: list[str], kit: Path) -> None:
    weights = next(iter(sorted(kit.rglob("layers*.mlpackage/**/weight.bin"))))
    content = bytearray(weights.read_bytes())
    content[-4096:] = b"\x55" * 4096
    weights.write_bytes(content)
    with pytest.raises(subprocess.CalledProcessError):
        serve([*command, "replay", str(kit)])
    assert (kit / "swift-result.json").exists()


def test_a_folder_without_a_kit_is_refused(command: list[str], tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        serve([*command, "replay", str(tmp_path)], stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("fault", [False, True])
def test_a_build_is_compared_with_what_it_carries(
    command: list[str], checkable: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: bool
) -> None:
    """With the same inputs, in the same passes, as `shardmill check`: its errors are the same but for a rounding."""
    build = shutil.copytree(checkable, tmp_path / "tiny")
    if fault:
        first, second, aside = (build / f"compiled/{name}.mlmodelc" for name in ("head_0", "head_1", "aside"))
        first.rename(aside), second.rename(first), aside.rename(second)
        with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
            serve([*command, "check", str(build)], "fp32")
    else:
        serve([*command, "check", str(build)], "fp32")
    said = [
        line.split(": ")[:2] for line in capfd.readouterr().err.splitlines() if ": T=1 " in line or "answer" in line
    ]
    heads, answer = (["wrong", "wrong"], "wrong") if fault else (["right", "right"], "right")
    assert said == [
        *([name, "right"] for name in ("layers_00_02", "layers_02_03", "layers_03_04")),
        *([name, state] for name, state in zip(("head_0", "head_1"), heads, strict=True)),
        ["first answer", answer],
    ]
