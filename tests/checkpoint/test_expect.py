"""The comparison of a checkpoint's tensors with those its config promises."""

import pytest

from shardmill.checkpoint.headers import TensorInfo, check_tensors
from shardmill.errors import CheckpointError

EXPECTED = {"norm": (4,), "proj": (4, 8)}


def info(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, "model.safetensors", 0, 0, dtype, shape)


def found(**changes: TensorInfo | None) -> dict[str, TensorInfo]:
    tensors = {name: info(name, shape) for name, shape in EXPECTED.items()} | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def test_sound_checkpoint_passes() -> None:
    for dtype in ("BF16", "F16", "F32"):
        check_tensors(found(norm=info("norm", (4,), dtype)), EXPECTED)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (found(proj=None), "1 missing (proj)"),
        (found(head=info("head", (1,))), "1 extra (head)"),
        (found(proj=info("proj", (8, 4))), "1 misshapen (proj is [8, 4] instead of [4, 8])"),
        (found(norm=info("norm", (4,), "I8")), "1 not BF16, F16 or F32 (norm is I8)"),
        (found(proj=None, norm=info("norm", (1,))), "1 missing (proj); 1 misshapen"),
        ({f"t{i}": info(f"t{i}", (1,)) for i in range(5)}, "5 extra (t0, t1, t2, ...)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_are_counted_and_named(tensors: dict[str, TensorInfo], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_tensors(tensors, EXPECTED)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_optional_tensors_may_be_absent_present_but_not_misshapen() -> None:
    """A tied head's own copy: welcome or missing; but where its shape is known it must be right."""
    check_tensors(found(proj=None), EXPECTED, optional={"proj"})
    check_tensors(found(rotary=info("rotary", (9,))), EXPECTED, optional={"rotary"})
    with pytest.raises(CheckpointError, match="misshapen"):
        check_tensors(found(proj=info("proj", (1,))), EXPECTED, optional={"proj"})


@pytest.mark.parametrize("shape", [(1,), (4,)])
def test_a_name_can_not_speak_to_the_terminal(shape: tuple[int, ...]) -> None:
    """A checkpoint's names are its author's: escapes would clear the screen, or write a line of ours."""
    name = "evil\n\x1b[31mX" + "y" * 1000
    with pytest.raises(CheckpointError) as caught:
        check_tensors(found() | {name: info(name, shape)}, EXPECTED | {name: (4,)} if shape == (1,) else EXPECTED)
    assert str(caught.value).isprintable() and "evil??[31mX" in str(caught.value)
    assert len(str(caught.value)) < 500
