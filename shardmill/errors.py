"""Errors a user can meet: one line that names the thing and the remedy, and a non-zero exit."""


class ShardmillError(Exception):
    """Base of every error that is reported as one line, without a traceback."""


class ConfigError(ShardmillError):
    """A config file that can't be built from."""


class CheckpointError(ShardmillError):
    """A checkpoint that is incomplete, damaged or not what the config says."""


class GateError(ShardmillError):
    """A measured number missed its threshold."""


class EngineGoneError(ShardmillError):
    """The process that runs a model's programs has ended."""


class UnreadableError(ShardmillError):
    """A record of our own that is missing, damaged or no JSON."""
