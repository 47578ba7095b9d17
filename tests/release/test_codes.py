"""`shardmill rebuild` of a calibrated build says how many codes differ, by matrix, and none where none do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pipeline import made
from safetensors.numpy import load_file, save_file

from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action
from shardmill.release import rebuild
from shardmill.release.rebuild import code_lines, codes_compared, compare_rebuilt, read_original

from .signed import run

STEPS = ("codes/head_0", "codes/layers_00_01", "packages/head_0", "plan")
Tensors = dict[str, NDArray[np.generic]]


def drawn(seed: int) -> Tensors:
    """Codes of two matrices, in INT4 and in a palette."""
    at = np.random.default_rng(seed)
    return {
        "a.weight.int4.codes": at.integers(-8, 8, (8, 16), np.int8),
        "a.weight.int4.scale": at.random(8).astype(np.float16),
        "b.weight.palette4.codes": at.integers(0, 16, (4, 16), np.uint8),
        "b.weight.palette4.lut": at.random((2, 16)).astype(np.float16),
    }


def write(folder: Path) -> Path:
    """The codes of both parts."""
    for seed, name in enumerate(STEPS[:2]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(drawn(seed), folder / f"{name}.safetensors")
    return folder


def falsify(file: Path, *changes: tuple[str, int]) -> None:
    """Adds one to the first few numbers of some tensors."""
    held = load_file(file)
    for name, count in changes:
        held[name].ravel()[:count] += 1
    save_file(held, file)


def test_codes_that_are_the_same_are_counted_in_one_line(tmp_path: Path) -> None:
    told = list(code_lines(write(tmp_path / "a"), write(tmp_path / "b"), STEPS))
    assert told == ["codes: 0 of 384 codes and 0 of 80 scales differ"]


def test_every_code_and_scale_that_differs_is_counted_where_it_is(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a"), write(tmp_path / "b")
    falsify(after / "codes/head_0.safetensors", ("a.weight.int4.codes", 3), ("a.weight.int4.scale", 1))
    falsify(after / "codes/layers_00_01.safetensors", ("b.weight.palette4.codes", 5), ("b.weight.palette4.lut", 2))
    assert list(code_lines(before, after, STEPS)) == [
        "codes: 8 of 384 codes and 3 of 80 scales differ, in 2 of 4 matrices",
        "codes/head_0: a.weight.int4: 3 of 128 codes and 1 of 8 scales differ",
        "codes/layers_00_01: b.weight.palette4: 5 of 64 codes and 2 of 32 scales differ",
    ]


def test_what_only_one_build_has_differs_throughout(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a"), write(tmp_path / "b")
    save_file({k: v for k, v in drawn(0).items() if k.startswith("a.")}, after / "codes/head_0.safetensors")
    told = list(code_lines(before, after, STEPS))
    assert told[1:] == ["codes/head_0: b.weight.palette4: 64 of 64 codes and 32 of 32 scales differ"]
    save_file({k: v[:1] for k, v in drawn(0).items()}, after / "codes/head_0.safetensors")  # another shape
    assert "128 of 128 codes and 8 of 8 scales" in list(code_lines(before, after, STEPS))[1]


def test_a_build_without_codes_and_one_that_lacks_them_say_so(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a"), write(tmp_path / "b")
    assert list(code_lines(before, after, ["packages/head_0"])) == []
    (after / "codes/head_0.safetensors").unlink()
    (told,) = code_lines(before, after, STEPS)
    assert told == "codes: codes/head_0.safetensors is not in both builds, so no codes were compared"


def calibrated(builds: Path, *changes: tuple[str, int]) -> Path:
    """A finished build with codes of a part, of which some are falsified."""
    build = made.write_parts(builds)
    file, store = build / "codes/head_0.safetensors", Store(builds / ".store")

    def work(outputs: dict[str, Path]) -> None:
        save_file(drawn(0), outputs["codes"])
        falsify(outputs["codes"], *changes)

    store.perform(Action("codes", {"changes": str(changes)}), {"codes": file}, made.receipt(file), work)
    made.judge(build)
    made.written(build)
    return build


@pytest.mark.parametrize(("changes", "code"), [((), 0), ((("a.weight.int4.codes", 2),), 0)])
def test_the_command_tells_how_many_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[tuple[str, int], ...], code: int
) -> None:
    """Here nothing but the codes is other, as where the matrix has another form: every subject has the same bytes."""
    build, again = calibrated(tmp_path / "one"), calibrated(tmp_path / "two", *changes)
    original = read_original(build)
    assert compare_rebuilt(original, again) == [] and len(codes_compared(original, again)) == 1 + len(changes)
    monkeypatch.setattr(rebuild, "check_tools", lambda original: None)
    monkeypatch.setattr(rebuild, "build_again", lambda *_: again)
    found, text = run("rebuild", build)
    assert found == code and "0 differing bytes" in text
    assert f"codes: {2 * len(changes)} of 192 codes and 0 of 40 scales differ" in text


def test_of_a_statement_alone_there_are_no_codes_to_compare(tmp_path: Path) -> None:
    build = calibrated(tmp_path / "one")
    assert codes_compared(read_original(build / "provenance.json"), build) == []
