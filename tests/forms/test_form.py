"""Forms: their names, what they weigh, and what can't have one."""

from __future__ import annotations

import pytest

from shardmill.errors import ConfigError
from shardmill.forms.form import form, matrices, misfit, spread, stored_bytes


def test_bytes_are_those_of_numbers_and_of_scales_or_tables() -> None:
    shape = (48, 100)
    assert stored_bytes("fp16", shape) == 2 * 4800
    assert stored_bytes("int8", shape) == 4800 + 2 * 48
    assert stored_bytes("int4", shape) == 2400 + 2 * 48
    assert stored_bytes("palette6", shape) == 3600 + 2 * 64
    assert stored_bytes("palette6/16", shape) == 3600 + 2 * 64 * 3
    assert stored_bytes("int4", (3, 3)) == 5 + 6  # the last byte is half full
    assert stored_bytes("int4", (48,)) == stored_bytes("int4", (1, 6, 8)) == 96  # no matrices


@pytest.mark.parametrize("name", ["int2", "INT8", "int8/16", "palette5", "palette4/0", "palette4/", "", "palette44"])
def test_other_names_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="no form of a matrix; there are fp16, int8, int4, palette4"):
        form(name)


def test_groups_divide_the_output_channels() -> None:
    assert misfit("palette4/16", (48, 100)) == ""
    assert misfit("palette4/32", (48, 100)) == "palette4/32: its 48 output channels do not divide into groups of 32"


def test_only_matrices_have_a_form() -> None:
    constants = {"norm.weight": (8,), "router.weight": (1, 4, 8), "proj.weight": (4, 8)}
    assert matrices(constants) == {"proj.weight": (4, 8)}
    assert spread("int4", constants) == spread({"proj.weight": "int4"}, constants) == {"proj.weight": "int4"}
