"""Errors that a caller of `shardmill.decode` can cause; each is one line with the thing and the remedy."""


class DecodeError(ValueError):
    """A request or a setting that decoding cannot honour."""


class PromptTooLongError(DecodeError):
    """The prompt does not fit into the engine's KV slots."""
