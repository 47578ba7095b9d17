"""The libraries that signing needs, an extra of their own: an engineer who only builds does not install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardmill.errors import ShardmillError

MODULES = ("cryptography", "cyclonedx", "model_signing", "OpenSSL", "securesystemslib", "sigstore_models")


@contextmanager
def signing_libraries() -> Iterator[None]:
    """Wraps what imports them. Raises ShardmillError, with the remedy, where one is not there."""
    try:
        yield
    except ImportError as error:
        if str(error.name).partition(".")[0] in MODULES:
            raise ShardmillError(f"{error.name} is not installed; in a clone: pip install -e '.[sign]'") from error
        raise
