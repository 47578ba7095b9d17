"""What a caller of `shardmill.decode` can do wrong, each error one line that names the thing and the
remedy.
"""


class DecodeError(ValueError):
    """A request or a setting that decoding cannot honour."""


class PromptTooLongError(DecodeError):
    """The prompt does not fit into the engine's KV slots."""
