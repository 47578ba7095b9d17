"""provenance.json and test-results.jsonl: complete, the same wherever they are written, accepted by strict parsers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult as Result
from in_toto_attestation.v1.statement import Statement
from manifests import manifest
from packageurl import PackageURL

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import UnreadableError
from shardmill.files import digest, dumps, sealed, write_json
from shardmill.gates.measurement import Measurement, compare
from shardmill.pipeline.steps.provenance import Records, _checkpoint, provenance
from shardmill.records import attest
from shardmill.records.attest import package_descriptors, parameters, read_provenance, versions
from shardmill.records.finished import gate_statements

STEPS = ["plan", "reference", "packages/head_0", "compiled/head_0", "residency/head_0", "parity/head_0", "parity/stack"]
GATES = [name for name in STEPS if name.startswith(("residency/", "parity/"))]
SETTINGS = {"model": "tiny", "source": {"path": None, "repo": "a/b"}, "parity": {"text": "resources/text.txt"}}
JUDGED = {
    "packages/head_0.mlpackage/Manifest.json": "3" * 64,
    "packages/head_0.mlpackage/a/b": "4" * 64,
    "compiled/head_0.mlmodelc/model.mil": "5" * 64,
}


def write_build(folder: Path, repo: str | None = "a/b") -> Records:
    """A build of one part."""
    files = {"config.json": {"sha256": "c" * 64, "size": 1}, "model.safetensors": {"sha256": "d" * 64, "size": 2}}
    write_json(folder / "source.receipt.json", {"repo": repo, "commit": "e" * 40 if repo else "local", "files": files})
    write_json(folder / "model.json", manifest())
    receipts = [folder / f"{name}.receipt.json" for name in STEPS]
    for path, name in zip(receipts, STEPS, strict=True):
        outputs = {"verdict": digest(name)} if name in GATES else {"package": "f" * 64}
        write_json(path, sealed({"step": name, "key": name, "outputs": outputs, "packages": {"numpy": "2.4.6"}}))
    for name in GATES:
        gate = compare([Measurement("kl", 0.001), Measurement("psnr", 31.0)])
        write_json(folder / f"{name}.json", {"part": Path(name).stem, "gate": gate, "engine": {"name": "portable"}})
    (folder / "text.txt").write_text("fed")
    verdicts = [folder / f"{name}.json" for name in GATES]
    (folder / "recipe.json").write_text("forms")
    named = {"parity.text": folder / "text.txt", "convert.precision": folder / "recipe.json"}
    return Records(folder / "source.receipt.json", folder / "model.json", receipts, verdicts, named, SETTINGS)


def made_in(folder: Path, repo: str | None = "a/b") -> dict[str, Any]:
    records = write_build(folder, repo)
    results = folder / "test-results.jsonl"
    results.write_text(
        "".join(json.dumps(row) + "\n" for row in gate_statements(records.manifest.parent, records.verdicts))
    )
    return provenance(records, results)


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    return made_in(tmp_path)


@pytest.fixture
def results(tmp_path: Path) -> list[dict[str, Any]]:
    return gate_statements(tmp_path, write_build(tmp_path).verdicts)


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row for row in rows}


def dependencies(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return by_name(made["predicate"]["buildDefinition"]["resolvedDependencies"])


def strictly_parsed(statement: dict[str, Any], kind: type) -> Any:
    """A statement as in-toto's own classes read it; what they do not know raises."""
    json_format.Parse(json.dumps(statement), Statement([], "", {}).pb, ignore_unknown_fields=False)
    Statement.copy_from_pb(json_format.ParseDict(statement, Statement([], "", {}).pb)).validate()
    return json_format.ParseDict(statement["predicate"], kind(), ignore_unknown_fields=False)


@pytest.mark.thorough(but=["a/b"])
@pytest.mark.parametrize("repo", ["a/b", None])
def test_strict_parsers_take_the_provenance(tmp_path: Path, repo: str | None) -> None:
    parsed = strictly_parsed(made_in(tmp_path, repo), Provenance)
    definition = parsed.build_definition
    assert definition.build_type.startswith("https://") and parsed.run_details.builder.id.startswith("https://")
    for row in definition.resolved_dependencies:
        assert row.uri or row.digest, row.name


def test_strict_parsers_refuse_what_they_do_not_know(made: dict[str, Any]) -> None:
    """Else the test above would show nothing."""
    made["predicate"]["runDetails"]["shardmill_steps"] = {}
    with pytest.raises(json_format.ParseError, match="shardmill_steps"):
        strictly_parsed(made, Provenance)


def test_strict_parsers_take_the_verdicts(results: list[dict[str, Any]]) -> None:
    parsed = [strictly_parsed(result, Result) for result in results]
    assert [one.result for one in parsed] == ["PASSED"] * 3
    assert list(parsed[0].passed_tests) == ["parity/head_0.kl", "parity/head_0.psnr"]


def test_build_type_and_builder_are_headings_of_a_page_in_docs(made: dict[str, Any]) -> None:
    docs = Path(__file__).parents[2] / "docs"
    definition, details = made["predicate"]["buildDefinition"], made["predicate"]["runDetails"]
    for address in (definition["buildType"], details["builder"]["id"]):
        page, heading = address.rpartition("/docs/")[2].split("#")
        headings = [line.lstrip("# ").lower().replace(" ", "-") for line in (docs / page).read_text().splitlines()]
        assert heading in headings


def test_every_file_of_the_model_and_every_verdict_is_a_subject(made: dict[str, Any], tmp_path: Path) -> None:
    subjects = {row["name"]: row["digest"]["sha256"] for row in made["subject"]}
    assert subjects == {
        "model.json": hashlib.sha256((tmp_path / "model.json").read_bytes()).hexdigest(),
        "embedding.safetensors": "1" * 64,
        "source/tokenizer.json": "2" * 64,
        "source/tokenizer_config.json": "6" * 64,
        **JUDGED,
        **{f"{name}.json": digest(name) for name in GATES},
    }


def test_the_checkpoint_is_named_by_commit_and_file_by_file(made: dict[str, Any]) -> None:
    found = dependencies(made)
    assert found["source"] == {
        "name": "source", "uri": f"pkg:huggingface/a/b@{'e' * 40}", "digest": {"gitCommit": "e" * 40},
    }  # fmt: skip
    assert found["source/config.json"]["digest"] == {"sha256": "c" * 64}
    assert found["source/model.safetensors"]["uri"] == f"pkg:huggingface/a/b@{'e' * 40}#model.safetensors"


def test_a_commit_from_a_lock_names_the_lock() -> None:
    """The model's and the drafter's, each with what was asked; a pinned commit names none."""
    plain = {"repo": "a/b", "commit": "e" * 40, "files": {}}
    locks = [{"lock": "m.lock", "revision": "main"}, {"lock": "m.lock", "revision": "v1"}]
    rows = _checkpoint(plain | {"drafter": plain}, locks)
    assert [row["annotations"] for row in rows] == locks
    assert not any("annotations" in row for row in _checkpoint(plain | {"drafter": plain}, [None, None]))


def test_a_tokenizer_that_got_tokens_is_no_file_of_the_hub_s() -> None:
    """The hub's own is named beside it, as the weights before a merge are."""
    of_hub, made_here = ({"tokenizer.json": {"sha256": letter * 64, "size": 3}} for letter in "ab")
    source = {"repo": "a/b", "commit": "e" * 40, "files": made_here, "completed": of_hub}
    found = {row["name"]: row for row in _checkpoint(source)}
    assert found["source/tokenizer.json"] == {"name": "source/tokenizer.json", "digest": {"sha256": "b" * 64}}
    assert found["base/tokenizer.json"]["digest"] == {"sha256": "a" * 64}
    assert found["base/tokenizer.json"]["uri"].endswith(f"@{'e' * 40}#tokenizer.json")


def test_a_checkpoint_from_a_folder_has_no_address(tmp_path: Path) -> None:
    found = dependencies(made_in(tmp_path, None))
    assert "source" not in found
    assert found["source/config.json"] == {"name": "source/config.json", "digest": {"sha256": "c" * 64}}


def test_the_tools_are_named_with_their_versions(made: dict[str, Any]) -> None:
    found = dependencies(made)
    assert found["numpy"]["annotations"] == {"decides": "bytes"}
    for name in ("numpy", "safetensors", "torch", "snakemake"):  # also what only a package of ours asks for
        url = PackageURL.from_string(found[name]["uri"])
        assert (url.type, url.name, url.version) == ("pypi", name, versions([found[name]])[name])
    assert PackageURL.from_string(found["cpython"]["uri"]).type == "generic"
    assert found["parity.text"]["digest"] == {"sha256": hashlib.sha256(b"fed").hexdigest()}
    assert found["convert.precision"]["digest"] == {"sha256": hashlib.sha256(b"forms").hexdigest()}


def test_the_hash_of_a_wheel_is_told_where_the_installer_wrote_it(tmp_path: Path, monkeypatch: Any) -> None:
    """A local version's + is spelled as package URLs have it."""
    info = tmp_path / "thing-1.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0+cpu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert by_name(package_descriptors(["thing"]))["thing"] == {
        "name": "thing", "uri": "pkg:pypi/thing@1.0%2Bcpu", "annotations": {"decides": "bytes"},
    }  # fmt: skip
    (info / "direct_url.json").write_text(json.dumps({"url": "u", "archive_info": {"hashes": {"sha256": "7" * 64}}}))
    assert by_name(package_descriptors(["thing"]))["thing"]["digest"] == {"sha256": "7" * 64}


def test_the_whole_config_is_a_parameter_and_nothing_of_the_machine() -> None:
    settings = {
        "model": "tiny",
        "source": {"path": "/home/me/checkpoint", "repo": None},
        "tokens": {"max": 4},
        "convert": {"precision": "/home/me/recipe.json", "calibration": {"text": "~/books/mine.txt", "seen": 2}},
        "parity": {"text": "../secret/parity.txt", "positions": 8},
        "benchmark": {"text": "resources/text/code.txt", "task_prompts": "~/prompts"},
    }
    assert parameters(settings) == {
        "model": "tiny",
        "source": {"path": "checkpoint"},
        "tokens": {"max": 4},
        "convert": {"precision": "recipe.json", "calibration": {"text": "mine.txt", "seen": 2}},
        "parity": {"text": "parity.txt", "positions": 8},
        "benchmark": {"text": "resources/text/code.txt", "task_prompts": "prompts"},
    }
    assert parameters({"benchmark": False}) == {"benchmark": False}


def test_every_receipt_is_kept(made: dict[str, Any], tmp_path: Path) -> None:
    """Receipts of several steps share a file name: none may push another out."""
    steps = made["predicate"]["buildDefinition"]["internalParameters"]["steps"]
    assert sorted(step["step"] for step in steps.values()) == sorted(STEPS)
    named = by_name(made["predicate"]["runDetails"]["byproducts"])
    for name in [f"{step}.receipt.json" for step in STEPS] + ["test-results.jsonl", "source.receipt.json"]:
        assert named[name]["digest"]["sha256"] == hash_file(tmp_path / name)


def test_nothing_tells_where_or_when_it_was_written(tmp_path: Path) -> None:
    here, there = made_in(tmp_path / "here"), made_in(tmp_path / "elsewhere" / "there")
    assert dumps(here) == dumps(there)
    assert str(tmp_path) not in json.dumps(here)


def test_nothing_unknown_is_null(made: dict[str, Any]) -> None:
    assert "null" not in json.dumps(made)


def test_a_verdict_speaks_of_the_files_that_its_gate_judged(results: list[dict[str, Any]], tmp_path: Path) -> None:
    for result in results:
        assert {row["name"]: row["digest"]["sha256"] for row in result["subject"]} == JUDGED
    (verdict,) = results[0]["predicate"]["configuration"]
    assert verdict["digest"] == {"sha256": hash_file(tmp_path / "parity/head_0.json")}
    assert verdict["annotations"]["thresholds"] == {"kl": "<= 0.02", "psnr": ">= 30"}


def test_what_was_not_measured_has_not_passed(tmp_path: Path) -> None:
    records = write_build(tmp_path)
    verdict = {"part": "head_0", "gate": compare([Measurement("ineligible", 0)]), "evidence": "predicted"}
    write_json(tmp_path / "residency/head_0.json", verdict | {"not_run": {"unknown": "needs a Mac"}})
    told = gate_statements(records.manifest.parent, records.verdicts)[-1]["predicate"]
    assert told["passedTests"] == ["residency/head_0.ineligible"]
    notes = told["configuration"][0]["annotations"]
    assert (notes["evidence"], notes["not_run"]) == ("predicted", {"unknown": "needs a Mac"})


def test_a_number_that_missed_is_a_failed_test(tmp_path: Path) -> None:
    records = write_build(tmp_path)
    write_json(tmp_path / "parity/head_0.json", {"part": "head_0", "gate": compare([Measurement("kl", 1.0)])})
    told = gate_statements(records.manifest.parent, records.verdicts)[0]["predicate"]
    assert (told["result"], told["passedTests"], told["failedTests"]) == ("FAILED", [], ["parity/head_0.kl"])


def test_a_commit_is_told_where_there_is_one(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "shardmill"
    package.mkdir()
    monkeypatch.setattr(attest.shardmill, "__file__", str(package / "__init__.py"))
    assert attest.workflow() == {"name": "workflow", "uri": "pkg:pypi/shardmill@0.1.0"}
    (package / "workflow").mkdir()
    (package / "workflow/commit.txt").write_text("a" * 40 + "\n")
    row = attest.workflow()
    assert row["digest"] == {"gitCommit": "a" * 40} and row["uri"].startswith("git+https://")


def test_files_that_are_not_the_commit_s_are_told(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "shardmill"
    package.mkdir()
    (package / "__init__.py").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        attest._git(tmp_path, *words)
    monkeypatch.setattr(attest.shardmill, "__file__", str(package / "__init__.py"))
    row = attest.workflow()
    assert len(row["digest"]["gitCommit"]) == 40 and "annotations" not in row
    (package / "__init__.py").write_text("2")
    assert "modified" in attest.workflow()["annotations"]


def test_damage_shows(made: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "provenance.json"
    write_json(path, made)
    assert read_provenance(path) == made
    content = path.read_bytes()
    for damaged in (content.replace(b"tiny", b"tinz"), content.replace(b"\n", b"\r\n")):
        path.write_bytes(damaged)
        with pytest.raises(UnreadableError, match="damaged"):
            read_provenance(path)
