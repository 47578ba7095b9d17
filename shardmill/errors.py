"""Errors a user can meet: one line that names the thing and the remedy, and a non-zero exit."""


class ShardmillError(Exception):
    """Base of every error that is reported as one line, without a traceback."""


class ConfigError(ShardmillError):
    """A config file that no build can use."""


class CheckpointError(ShardmillError):
    """A checkpoint that is incomplete, damaged or does not match the config."""


class GateError(ShardmillError):
    """A measured number that missed its threshold."""


class AdapterError(ShardmillError):
    """An adapter that a build lacks, or that is damaged or made for other programs."""


class EngineGoneError(ShardmillError):
    """The end of the process that runs a model's programs."""


class UnreadableError(ShardmillError):
    """A record written by shardmill that is missing, damaged or not JSON."""
