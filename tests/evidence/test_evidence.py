"""Evidence is taken as it is or not at all, and never mixed with what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardmill.errors import ShardmillError
from shardmill.evidence.build import contradictions, measured_verdicts, read_evidence
from shardmill.evidence.file import file_name, of_build, read_result
from shardmill.evidence.folder import evidence_files
from shardmill.files import sealed

from .results import MANIFEST, PARTS, evidence, line, measurements, planned, result, write

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/device.schema.json").read_text())


def verdict(*rows: tuple[str, str, tuple[str, ...]], rule: str = "", said: str = "predicted") -> dict[str, Any]:
    """residency/layers_00_02.json. Args: rows of output, status and rules."""
    found = [
        {"function": "main", "output": output, "operation": "conv", "status": status, "rules": list(rules)}
        for output, status, rules in rows
    ]
    return {"part": PARTS[0], "evidence": said, "rows": found, "findings": [{"rule": rule}] if rule else []}


def test_a_result_by_hand_fits_the_schema() -> None:
    jsonschema.validate(result(), SCHEMA)


def test_it_is_filed_by_chip_and_system() -> None:
    assert file_name(result()) == "apple-m4-max-macos-26.1-25b78.json"
    assert file_name(result(engine="portable_coreml")) == "apple-m4-max-macos-26.1-25b78-portable-coreml.json"


def test_what_macos_leaves_beside_a_result_is_none(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    for name in ("a.json", "._a.json", ".DS_Store"):
        (tmp_path / "evidence" / name).touch()
    assert evidence_files(tmp_path) == [tmp_path / "evidence/a.json"]


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A deep copy that lacks one thing, sealed again."""
    copy = json.loads(json.dumps(content))
    place = copy
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return sealed(copy)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({}, id="nothing"),
        pytest.param([], id="a list"),
        pytest.param(sealed({"format": 1}), id="a record of something else"),
        pytest.param(sealed({**result(), "format": 2}), id="a newer format"),
        pytest.param({**result(), "kit": "d" * 64}, id="changed since"),
        pytest.param(without(result(), "machine", "chip"), id="no chip"),
        pytest.param(without(result(), "variants", "small", "artifacts"), id="no artifacts"),
        pytest.param(result({"pass.T=1": line("splendid")}), id="a status that nobody knows"),
        pytest.param(result({"pass.T=1": {"status": "ok"}}), id="half a line"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    with pytest.raises(ShardmillError, match=r"no result\.json of measure\.py") as error:
        read_result(file)
    assert len(str(error.value).splitlines()) == 1


def test_it_is_of_the_build_whose_packages_it_names() -> None:
    other = {**MANIFEST, "packages": {**MANIFEST["packages"], "head_0": {"files": {"a": "9" * 64}}}}
    assert of_build(Path("x"), result(), MANIFEST) is not None
    assert of_build(Path("x"), result(), other) is None


def twins(**described: Any) -> dict[str, Any]:
    """A result of two builds of the same packages, the second of which is described otherwise."""
    content = result()
    other = json.loads(json.dumps(content["variants"]["small"]))
    other["described"] |= described
    content["variants"]["twin"] = {**other, "model": "twin"}
    return sealed(content)


def test_builds_of_the_same_packages_are_told_apart_by_their_bundles() -> None:
    """Whether functions have bundles of their own is just what such a kit is made to compare."""
    apart = [{**part, "program": {**part["program"], "bundles": {"1": "t1"}}} for part in MANIFEST["parts"]]
    content = twins(bundles="each")
    for manifest, name in ((MANIFEST, "small"), ({**MANIFEST, "parts": apart}, "twin")):
        found = of_build(Path("x"), content, manifest)
        assert found is not None and found.variant["model"] == name
    assert of_build(Path("x"), result(), {**MANIFEST, "parts": apart}) is None


def test_of_builds_of_the_same_packages_the_one_with_its_widths_counts() -> None:
    """A program of flexible shapes is the same whatever widths a config verifies drafts with."""
    for widths, name in (([1, 4], "small"), ([1, 2, 4], "twin"), ([1, 3, 4], "small")):
        found = of_build(Path("x"), twins(widths=[1, 2, 4]), {**MANIFEST, "widths": widths})
        assert found is not None and found.variant["model"] == name


def test_evidence_of_older_programs_is_named_and_not_used(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", result())
    other = {**MANIFEST, "packages": {PARTS[0]: {"files": {"a": "9" * 64}}}}
    assert read_evidence([file], other) == ([], ["a.json"])
    ((found,), stale) = read_evidence([file], MANIFEST)
    assert (found.variant["model"], stale) == ("small", [])


def test_troubles_are_named_and_the_probes_of_a_search_are_not() -> None:
    lines = {
        "head_0/load.first": line("crashed", "killed by SIGKILL in load"),
        "head_0/bisect#7": line("crashed", "killed by SIGKILL in load"),
        "head_0/bisect": line("ok", "fails from conv logits on"),
        "pass.T=1": line("not_run", "head_0/load.first: crashed"),
    }
    assert evidence(lines).troubles == [
        ("head_0/bisect", "bisected", "fails from conv logits on"),
        ("head_0/load.first", "crashed", "killed by SIGKILL in load"),
    ]


def test_sums_need_every_program() -> None:
    assert evidence().total("load.first", "load_seconds") == 101.0
    lines = measurements() | {"head_0/load.first": line("crashed", "killed")}
    assert evidence(lines).total("load.first", "load_seconds") is None
    assert evidence({}).total("load.first", "load_seconds") is None


def test_what_contradicts_a_rule_carries_its_name() -> None:
    lines = {
        f"{PARTS[0]}/residency.T=1": planned(("conv", "a", "ane"), ("conv", "b", "ineligible"), ("add", "c", "ane"))
    }
    predicted = verdict(("a", "ineligible", ("O3",)), ("b", "eligible", ()), ("c", "eligible", ()))
    found = contradictions(evidence(lines), [predicted])
    assert [(c.output, c.predicted, c.rules, c.measured) for c in found] == [
        ("a", "ineligible", ("O3",), "eligible"),
        ("b", "eligible", (), "ineligible"),
    ]
    (small,) = contradictions(
        evidence(lines), [verdict(("a", "eligible", ()), ("b", "ineligible", ()), ("c", "eligible", ()), rule="W5")]
    )
    assert (small.rules, small.output) == (("W5",), "a")


def test_a_part_has_the_rows_of_its_own_plans_that_there_are() -> None:
    """Of its several programs all, and none of another part, of another measurement or of a plan that was refused."""
    lines = measurements() | {
        f"{PARTS[0]}.0/residency.T=1": planned(("conv", "a", "ane")),
        f"{PARTS[0]}.1/residency.T=4": planned(("conv", "b", "ane")),
        f"{PARTS[0]}.2/residency.T=8": line("refused", "no plan"),
        f"{PARTS[0]}.0/parity.T=1": line(psnr=60.0),
        f"{PARTS[1]}/residency.T=1": planned(("conv", "c", "ane")),
    }
    found = evidence(lines).residency(PARTS[0])
    assert [(row["output"], row["shape"]) for row in found] == [("a", "T=1"), ("b", "T=4")]


def test_what_was_measured_here_or_nowhere_contradicts_nothing() -> None:
    lines = {f"{PARTS[0]}/residency.T=1": planned(("conv", "a", "ineligible"))}
    assert contradictions(evidence(lines), [verdict(("a", "eligible", ()), said="measured")]) == []
    assert contradictions(evidence(), [verdict(("a", "eligible", ()))]) == []


def test_a_finding_about_a_small_program_is_contradicted_by_the_engine_alone() -> None:
    """W5 says that its operations are left to the CPU; what else was found is no such claim."""
    plans = {status: {f"{PARTS[0]}/residency.T=1": planned(("conv", "a", status))} for status in ("ane", "not_chosen")}
    predicted = {rule: verdict(("a", "eligible", ()), rule=rule) for rule in ("W5", "S7")}
    assert [c.rules for c in contradictions(evidence(plans["ane"]), [predicted["W5"]])] == [("W5",)]
    assert contradictions(evidence(plans["ane"]), [predicted["S7"]]) == []
    assert contradictions(evidence(plans["not_chosen"]), [predicted["W5"]]) == []
    kept = [measured_verdicts([one], [evidence(plans["ane"])])[0]["findings"] for one in predicted.values()]
    assert kept == [predicted["W5"]["findings"], []]


def test_another_engine_contradicts_nothing_and_replaces_nothing() -> None:
    lines = {f"{PARTS[0]}/residency.T=1": planned(("conv", "a", "ineligible"))}
    predicted = verdict(("a", "eligible", ()))
    other = evidence(lines, engine="portable_coreml")
    assert contradictions(other, [predicted]) == []
    assert measured_verdicts([predicted], [other]) == (predicted,)


def test_measured_beats_predicted_and_not_measured() -> None:
    lines = {f"{PARTS[0]}/residency.T={width}": planned(("conv", "a", "ane")) for width in (1, 4)}
    (better,) = measured_verdicts([verdict(("a", "eligible", ()))], [evidence(lines)])
    assert better["evidence"] == "measured"
    assert [(row["shape"], row["status"], row["evidence"]) for row in better["rows"]] == [
        ("T=1", "ane", "measured"),
        ("T=4", "ane", "measured"),
    ]
    known = verdict(("a", "ane", ()), said="measured")
    assert measured_verdicts([known], [evidence(lines)]) == (known,)


def test_a_shorter_context_of_the_same_programs_stands_beside_the_whole_one() -> None:
    """What goes wrong in it is a trouble of the build; two builds of one context are not taken for two lengths."""
    content = result()
    whole = content["variants"]["small"]
    wrong = line("wrong", "psnr is 3 dB")
    short = {**whole, "described": whole["described"] | {"context": 16}, "measurements": {"pass.T=1": wrong}}
    content["variants"] = {"a@16": short, "small": whole, "twin": whole}
    found = of_build(Path("x"), content, MANIFEST)
    assert found is not None and (found.context, found.variant) == (64, whole)
    assert [(one.context, one.variant) for one in found.shorter] == [(16, short)]
    assert found.troubles == [("pass.T=1 in 16 slots", "wrong", "psnr is 3 dB")]
