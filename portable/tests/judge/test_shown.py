"""A judgement as text, Markdown, JSON, SARIF and annotations: each has what was found, and no name breaks out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from portable_coreml.judge.against import Against, Pair, Parting
from portable_coreml.judge.report import Group, Report, judge
from portable_coreml.judge.shown import annotations_of, json_of, markdown_of, sarif_of, text_of, text_of_against

EVIL = "conv\x1b[2J\n::error::|`<b>"


@pytest.fixture(scope="module")
def report(attention_package: Path) -> Report:
    return judge(attention_package)


def evil() -> Report:
    groups = [
        Group(level, f"R{level}", "title: a, b", f"why {EVIL}", "50% less", (EVIL,), 3)
        for level in ("error", "warn", "info")
    ]
    return Report("a,b.mlpackage", 8, 5, (), (), tuple(groups))


def test_text_says_what_it_is_and_what_was_found(report: Report) -> None:
    lines = list(text_of(report))
    assert lines[0].startswith(f"{report.path}: ML Program, specification 9, ")
    assert "  state cache_k: float16 [1, 1, 8, 32]" in lines
    assert any(line.startswith("  input x: float16 [1, 32, 1..4, 1]; fed with normal numbers") for line in lines)
    assert any(
        line.startswith("weights/weight.bin: ") and "taken by macOS 15 to 27 and iOS 18 to 27" in line for line in lines
    )
    for group in report.findings:
        (line,) = (line for line in lines if line.startswith(f"{group.level}: {group.rule}: "))
        assert group.why in line and group.remedy in line and group.evidence in line
    assert lines[-1].startswith(f"{report.path}: 0 errors, ")


def test_json_has_every_operation_and_no_number_that_json_lacks(report: Report) -> None:
    infinite = Pair("y", "conv", "y", float("inf"), False)
    against = Against("b", 0.1, (infinite,), (Parting("y", "conv", "", "", None, ""),), (infinite,), 0)
    whole = json_of([report, Report("b", 8, 5, (), (), (), against)], {"c": "damaged"})
    again = json.loads(json.dumps(whole, allow_nan=False))
    assert again["version"] == 1 and again["refused"] == [{"path": "c", "why": "damaged"}]
    rows = again["reports"][0]["functions"][0]["rows"]
    assert len(rows) == len(report.functions[0].rows) and {"own", "total", "kind", "output"} <= rows[0].keys()
    assert again["reports"][1]["against"]["outputs"][0]["difference"] is None


def test_sarif_has_what_a_viewer_of_code_needs(report: Report) -> None:
    """By GitHub's page on SARIF: a rule for each result, a level, a place in a file that can be shown."""
    log = sarif_of([report, evil()], "1.2.3")
    assert (log["version"], log["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules)) and run["tool"]["driver"]["version"] == "1.2.3"
    assert len(run["results"]) == len(report.findings) + 3
    for result in run["results"]:
        assert result["ruleId"] in rules and result["level"] in ("error", "warning", "note")
        (location,) = result["locations"]
        assert location["physicalLocation"]["region"] == {"startLine": 1}
        assert "\x1b" not in json.dumps(result) and "\n" not in result["message"]["text"]
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place == f"{report.path}/Manifest.json" and Path(place).is_file()


def test_names_cannot_become_commands_or_markup() -> None:
    """An author chooses the names of values, so no name may make a line, a colour or a further annotation."""
    lines = list(annotations_of(evil()))
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning"]  # a remark is none
    assert all("\n" not in line and "\x1b" not in line and "50%25 less" in line for line in lines)
    assert "file=a%2Cb.mlpackage,title=Rerror%3A title%3A a%2C b::" in lines[0]
    text = markdown_of([evil()], {"c|d": "why <b>"})
    assert "\x1b" not in text and "`c?d` can't be judged: why \\<b\\>" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| error"))
    assert row.replace("\\|", "").count("|") == 6 and "and 2 more" in row


def test_a_comparison_names_both_sides() -> None:
    pairs = (Pair("y", "linear", "z", 0.5, False), Pair("s", "add", "s", 0.0, True))
    partings = tuple(Parting(f"v{i}", "conv", f"w{i}", "conv", 0.25, "'weight' differs by 1.00%") for i in range(7))
    text = "\n".join(text_of_against("a", Against("b", 0.001, pairs, partings, pairs, 3)))
    for part in (
        "output 'y' and 'z': differ by 50.00%",
        "output 's': the same, 0.00%",
        "parts at conv 'v0' and conv 'w0': 25.00%; 'weight' differs by 1.00%",
        "and at 2 more",
        "1 of 2 values have a counterpart; 3 of the other's have none",
    ):
        assert part in text
