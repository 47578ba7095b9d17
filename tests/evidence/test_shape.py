"""A result that nobody could compute with is refused when it is read, and not by a traceback of whoever reads it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shardmill.errors import ShardmillError
from shardmill.evidence.file import file_name, read_result
from shardmill.files import sealed

from .results import PARTS, line, measurements, planned, result, write

DESCRIBED, MEASURED = ("variants", "small", "described"), ("variants", "small", "measurements")
PASS = (*MEASURED, "pass.T=1")
PLAN = (*MEASURED, f"{PARTS[0]}/residency.T=1")
PLAN_VALUE = (*PLAN, "value")
HUGE = 10**400
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/device.schema.json").read_text())


def changed(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A whole result but for one value."""
    content = copy.deepcopy(result(measurements() | {PLAN[-1]: planned(("conv", "y", "ane"))}))
    found = content
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value
    return sealed(content)


def test_the_same_without_a_change_is_read(tmp_path: Path) -> None:
    assert read_result(write(tmp_path / "a.json", changed(("kit",), "d" * 64)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((((*DESCRIBED, "widths")), value) for value in (["1"], [1, None], [0, 1], [], [True], 4, [HUGE])),
        *((((*DESCRIBED, "context")), value) for value in ("x", {}, -1, True)),
        *((((*DESCRIBED, name)), "many") for name in ("programs", "weights_bytes", "state_bytes", "parameters")),
        ((*DESCRIBED, "weights_bytes"), HUGE),
        ((*DESCRIBED, "programs"), 0),
        ((*DESCRIBED, "kind"), "oracle"),
        ((*DESCRIBED, "shapes"), 3),
        ((*DESCRIBED, "precision"), []),
        *((((*PASS, "timing")), {"ms": value}) for value in (-5.0, True, "1", [1], HUGE)),
        *((((*PASS, "value")), {"agree": value}) for value in (-1, "7", [])),
        (PLAN_VALUE, {"counts": {}, "rows": []}),
        (PLAN_VALUE, {"evidence": "measured"}),
        *((PLAN_VALUE, {"evidence": "measured", "rows": value}) for value in (3, [{}], [None])),
        *((PLAN_VALUE, {"evidence": "measured", "rows": [], "counts": v}) for v in ([1], {"ane": "x"})),
        (("machine", "chip"), {"a": 1}),
        (("variants",), {"small": 3}),
    ],
)
def test_what_nobody_could_compute_with_is_refused(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    """Its place is told, in one line, and the value is not spread over the terminal."""
    file = write(tmp_path / "result.json", changed(place, value))
    with pytest.raises(ShardmillError, match=r"no result\.json of measure\.py") as error:
        read_result(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert ".".join(place) in str(error.value)
    if place != PLAN_VALUE or value.get("evidence") and "rows" in value:  # a schema can't tie them to the key
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed(place, value), SCHEMA)


def test_what_went_wrong_needs_no_figures(tmp_path: Path) -> None:
    lines = {PLAN[-1]: line("refused", "no plan"), "pass.T=1": line("ok", timing={"ms": None})}
    assert read_result(write(tmp_path / "a.json", result(lines)))


def test_a_result_in_another_spelling_is_not_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(write(tmp_path / "b.json", result()).read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(ShardmillError, match="not as that wrote it"):
        read_result(tmp_path / "a.json")


def test_a_result_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ShardmillError) as caught:
        read_result(tmp_path / "a.json")
    assert str(caught.value) == f"{tmp_path / 'a.json'}: No such file or directory"


def test_systems_with_long_or_foreign_names_have_files_of_their_own() -> None:
    names = [file_name(result(chip=chip)) for chip in ("苹果", "香蕉", "x" * 5000, "x" * 5001)]
    assert len({*names}) == 4 and all(len(name) < 130 and name.isascii() for name in names)


def test_json_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ShardmillError, match="no result"):
        read_result(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"format": 1, "x": eval("[" * 90 + "]" * 90)}))
    with pytest.raises(ShardmillError, match="no result"):
        read_result(tmp_path / "a.json")
