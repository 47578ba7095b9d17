"""Every input of every pass is owned by its program as long as Core ML may use it, even if the program is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import succeeded

from mac import driver

pytestmark = driver.LINUX_ONLY
PASSES = 1000
RUN = """
import sys, small
from pathlib import Path
import coremltools as ct
from shardmill.runtime.program import Program

bundle = Path(sys.argv[1])
ct.models.utils.compile_model(str(small.make(bundle.parent)), str(bundle))
for half in range(2):
    program = Program(bundle, {"inputs": {}, "states": {"kept": []}, "output": "hidden"})
    for number in range(int(sys.argv[2]) // 2):
        program(small.passed(1 + number % small.MOST, number / 1000))
"""


@pytest.mark.thorough
def test_no_input_of_a_thousand_passes_is_left_to_core_ml_or_changed_under_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = driver.run("-c", RUN, str(tmp_path / "small.mlmodelc"), str(PASSES), log=log, MAC_OWNERS="1")
    succeeded(ran)
    assert driver.events(log, "unsafe_release") == driver.events(log, "overwritten") == []
    sums = driver.events(log, "owners")[-1]
    assert (sums["passes"], sums["inputs"], sums["unsafe"]) == (PASSES, PASSES, 0)
