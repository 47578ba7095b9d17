"""What a family says of a config, with one line for a config that it stumbles over."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardmill.errors import CheckpointError

if TYPE_CHECKING:
    from shardmill.models.architecture import Model

STUMBLES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def described(family: ModuleType, config: Any, length: int) -> Model:
    """Return what the model of a transformers config is.

    Args:
        family: the module of its model_type.
        config: the config.
        length: positions that programs deal with.

    Raises:
        CheckpointError: for what can't be built, and for a field that is null or of a type that nobody thought of.
        Exception: what `family` stumbles over, if it does so over transformers' own default config too: that is a bug.
    """
    try:
        found: Model = family.describe(config, length)
    except STUMBLES as error:
        if _stumbles(family, type(config)(), length):
            raise
        raise CheckpointError(
            f"config.json: a field is null, or of another type than a {config.model_type} model's "
            f"({type(error).__name__}: {error})"
        ) from error
    return found


def _stumbles(family: ModuleType, config: Any, length: int) -> bool:
    """Return whether a family can't read a config, whatever is refused with a reason."""
    try:
        family.describe(config, length)
    except STUMBLES:
        return True
    except CheckpointError:
        pass
    return False
