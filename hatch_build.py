"""How shardmill depends on portable-coreml, which this repository also builds (portable/).

An editable install of a clone takes both from the clone (`dev-mode-dirs` in pyproject.toml); a wheel of shardmill asks
the installer for the distribution.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PORTABLE = "portable-coreml==0.1.0"


class DependOnPortable(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the dependency to what is not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Args: version "editable" or "standard"."""
        if version == "standard":
            build_data["dependencies"].append(PORTABLE)
