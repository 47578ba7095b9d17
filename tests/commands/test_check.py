"""`shardmill check`, and the commands that check a build by themselves, once on each machine."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from reciter import failure, shardmill
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from serve.running import running

from shardmill import machine
from shardmill.commands.check import check_once
from shardmill.evidence.file import read_result
from shardmill.files import write_json
from shardmill.runtime import process
from shardmill.runtime.engine import load
from shardmill.serve import server

pytestmark = pytest.mark.skipif(
    not machine.is_portable(), reason="compares in fp32 and fp16, which Core ML does not let choose"
)
REAL = process.load_engine
ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(checkable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a sound build, and a cache of this test's own; the model is loaded in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(process, "load_engine", load)
    return Path(shutil.copytree(checkable, tmp_path / "tiny"))


def receipts(build: Path) -> list[Path]:
    return [*(build.parent / "cache/shardmill/checks").glob("*")]


def without_results(build: Path) -> None:
    content = json.loads((build / "model.json").read_text())
    write_json(build / "model.json", {key: value for key, value in content.items() if key != "expected"})


def wrong(build: Path) -> None:
    """Let the build carry other results of a program, with a digest that agrees."""
    import checked

    with safe_open(build / checked.FILE, "np") as opened:
        about = opened.metadata()
    arrays = load_file(build / checked.FILE)
    arrays["layers_02_03/rows"] = arrays["layers_02_03/rows"] * np.float32(1.01)
    save_file(arrays, build / checked.FILE, about)
    checked.named(build)


def test_a_line_for_each_program_and_one_at_the_end(build: Path) -> None:
    result = shardmill("check", build)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == 7
    assert [line.split(": ")[1] for line in lines[:6]] == ["right"] * 6
    assert lines[-1].startswith(f"{build}: right on this machine: 5 programs, first answer: ")


def test_json_has_every_number_and_the_receipt_only_its_user_may_read(build: Path) -> None:
    content = json.loads(shardmill("check", build, "--json", "--precision", "fp16").stdout)
    assert (content["verdict"], content["engine"]) == ("right", {"name": "portable", "precision": "fp16"})
    rows = {row["name"]: row for row in content["parts"]}
    assert rows["head_0"]["errors"].keys() == {"T=1", "T=4", "the last slots"} and rows["head_0"]["limit"] > 1e-4
    assert rows["layers_00_02"]["evidence"] == "predicted" and rows["layers_00_02"]["counts"]["eligible"] > 20
    (receipt,) = receipts(build)
    assert Path(content["receipt"]) == receipt and stat.S_IMODE(receipt.stat().st_mode) == 0o600
    kept = json.loads(receipt.read_text())
    assert kept["parts"] == content["parts"] and kept["build"] == content["build"]
    assert not [path for path in build.rglob("*") if path.stat().st_mtime > receipt.stat().st_mtime]


def test_a_wrong_program_ends_it_with_exit_code_1_and_what_to_do(build: Path) -> None:
    wrong(build)
    result = shardmill("check", build)
    assert result.exit_code == 1 and "layers_02_03: wrong: 0.0099 of the result away" in result.stdout
    assert "pull or build it again; --no-check" in result.stdout.splitlines()[-1]
    for _ in range(2):  # no receipt keeps a second command from finding it
        assert failure("generate", build, "--prompt", "x").startswith(f"{build}: WRONG on this machine: layers_02_03: ")
    assert shardmill("generate", build, "--prompt", "x", "--max-new-tokens", 1, "--no-check").exit_code == 0


def test_a_file_that_model_json_does_not_name_is_no_build_to_check(build: Path) -> None:
    (build / "embedding.safetensors").write_bytes(b"")
    assert failure("check", build) == (
        f"{build}/embedding.safetensors: not the file that model.json names; pull or build it again"
    )


def test_a_build_without_results_says_so_in_a_line(build: Path) -> None:
    without_results(build)
    result = shardmill("check", build)
    assert result.exit_code == 0 and result.stdout.splitlines()[-1].startswith(
        f"{build}: loads, and has no results to compare with: it was built before shardmill recorded results ("
    )
    assert shardmill("generate", build, "--prompt", "x", "--max-new-tokens", 1).stderr.count("\n") == 1


def test_generate_checks_a_build_once(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again on another system or processor, in another precision, and after another build has taken its place."""

    def checks(*options: object) -> int:
        result = shardmill("generate", build, "--prompt", "x", "--max-new-tokens", 1, *options)
        assert result.exit_code == 0, result.output
        return result.stderr.count(
            "right on this machine: 5 programs, first answer: its 8 tokens are the recorded ones"
        )

    assert [checks("--no-check"), checks(), checks(), checks("--precision", "fp16"), checks()] == [0, 1, 0, 1, 0]
    content = json.loads((build / "model.json").read_text())
    write_json(build / "model.json", content | {"model": "other"})
    assert [checks(), checks()] == [1, 0]
    monkeypatch.setattr(machine, "engine", lambda: {"name": "portable", "build": "27A1"})
    assert [checks(), checks()] == [1, 0]
    monkeypatch.setattr(machine, "machine", lambda: {"processor": "another", "cores": 2})
    assert [checks(), checks()] == [1, 0]


def test_a_text_is_the_same_after_a_check(build: Path) -> None:
    """Nothing that a check has fed is left."""
    first, second = (shardmill("generate", build, "--prompt", "def", "--max-new-tokens", 20) for _ in range(2))
    assert "right on this machine" in first.stderr and "right on" not in second.stderr
    assert first.stdout == second.stdout


def test_a_cache_that_can_t_be_written_keeps_nobody_from_a_text(build: Path) -> None:
    (build.parent / "cache").write_text("no folder")
    model: Any = load(build, "fp32")
    assert [check_once(build, model, "fp32", skip=False) for _ in range(2)] == ["right", "right"]


def test_a_damaged_receipt_counts_as_none(build: Path) -> None:
    model: Any = load(build, "fp32")
    assert check_once(build, model, "fp32", skip=False) == "right"
    (receipt,) = receipts(build)
    receipt.write_text(receipt.read_text().replace("right", "wrong"))
    assert check_once(build, model, "fp32", skip=False) == "right" and '"verdict": "right"' in receipt.read_text()


def test_a_receipt_becomes_evidence_of_its_build(build: Path) -> None:
    """As a result of measure.py does; the report and `verify` read it."""
    receipt = json.loads(shardmill("check", build, "--json").stdout)["receipt"]
    result = shardmill("device", "import", receipt, build)
    assert result.exit_code == 0 and result.stdout.endswith(": 15 ok\n"), result.output
    (file,) = (build / "evidence").glob("*.json")
    content = read_result(file)
    lines = content["variants"]["tiny"]["measurements"]
    assert lines["layers_03_04/check.the-last-slots"]["status"] == "ok" and content["engine"] == {"name": "portable"}
    assert 0 < lines["head_1/check.T=4"]["value"]["relative_error"] < lines["head_1/check.T=4"]["value"]["limit"]
    jsonschema.validate(content, json.loads((ROOT / "docs/device.schema.json").read_text()))
    assert shardmill("device", "import", receipt, build).exit_code == 0  # the same file once more
    write_json(build / "model.json", json.loads((build / "model.json").read_text()) | {"model": "other"})
    assert failure("device", "import", receipt, build) == (
        f"{receipt}: is of a check of tiny, and of none of the builds here: {build}"
    )


@pytest.mark.thorough
def test_a_server_says_on_health_what_was_found(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was told not to check says nothing of it."""
    monkeypatch.setattr(process, "load_engine", REAL)
    loaded: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda load, *_: loaded.append(load()))
    for options, health in ((["--no-check"], {"status": "ok"}), ([], {"status": "ok", "check": "right"})):
        result = shardmill("serve", build, *options)
        assert result.exit_code == 0 and ("right on this machine" in result.stderr) is bool("check" in health)
        with running(loaded[-1]) as running_server:
            assert json.loads(running_server.request("GET", "/health")[2]) == health


def test_a_command_that_has_nothing_to_check_imports_no_coremltools() -> None:
    """It takes seconds, and writes lines of its own."""
    code = "import sys, shardmill.device.check; sys.exit('coremltools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
