"""Compares the tensors a checkpoint has with those its config promises: names, shapes and dtypes."""

from collections.abc import Collection, Mapping

from shardmill.checkpoint.headers import TensorInfo
from shardmill.errors import CheckpointError
from shardmill.printable import printable

WEIGHT_DTYPES = ("BF16", "F16", "F32")
SHOWN = 3
FAULT_LENGTH = 200  # of a name with two shapes


def check_tensors(
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
) -> None:
    """Raises one CheckpointError that names the first tensors missing, extra, misshapen or of a wrong dtype.

    `optional` names may be there or not (buffers, an untied copy of a tied head); where they are expected
    as well, their shape must still be right. Weights must be BF16, F16 or F32.
    """
    present = {name: info for name, info in found.items() if name in expected}
    shapes = [
        f"{name} is {list(info.shape)} instead of {list(expected[name])}"
        for name, info in sorted(present.items())
        if info.shape != tuple(expected[name])
    ]
    faults = [
        _count("missing", sorted(set(expected) - set(found) - set(optional))),
        _count("extra", sorted(set(found) - set(expected) - set(optional))),
        _count("misshapen", shapes),
        _count(f"not {', '.join(WEIGHT_DTYPES[:-1])} or {WEIGHT_DTYPES[-1]}", wrong_dtypes(present)),
    ]
    if any(faults):
        raise CheckpointError(
            f"tensors are not those that config.json describes: {'; '.join(filter(None, faults))}; "
            "check that both come from the same revision"
        )


def check_tied(hashes: Mapping[str, str], head: str, table: str) -> None:
    """Raises CheckpointError where the LM head is not the embedding table, though config.json ties them.

    Args:
        hashes: the sha256 of tensors.
        head: the name of the one.
        table: the name of the other.
    """
    if hashes[head] != hashes[table]:
        raise CheckpointError(
            f"tensor {head} is not the embedding table, though config.json ties them; transformers then computes with "
            'both: write "tie_word_embeddings": false there, or take the tensor out'
        )


def wrong_dtypes(found: Mapping[str, TensorInfo]) -> list[str]:
    """The tensors in a dtype that no weight may have, each as "NAME is DTYPE"."""
    return [f"{name} is {info.dtype}" for name, info in sorted(found.items()) if info.dtype not in WEIGHT_DTYPES]


def _count(fault: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(printable(name, FAULT_LENGTH) for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {fault} ({shown})"
