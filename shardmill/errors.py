"""Errors a user can meet: one line that names the thing and the remedy, and a non-zero exit."""

from __future__ import annotations


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


class LoadError(ShardmillError):
    """A program, or a table of the host, that can't be loaded."""

    def of(self, build: object) -> LoadError:
        """Return the error with what a person can do about a file of this build."""
        return LoadError(f"{self}; `shardmill verify {build}` tells whether it is damaged")


class ProgramError(ShardmillError):
    """NaN or infinity from a program, in place of the numbers that an answer is made from."""


class UnreadableError(ShardmillError):
    """A record written by shardmill that is missing, damaged or not JSON."""


class MediaError(ShardmillError):
    """A picture or a sound that can't be used."""
