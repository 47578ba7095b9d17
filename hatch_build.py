"""Add the workflow and the commit to a wheel, and the commit to a source distribution.

An editable install of a clone has the workflow where it lies; a wheel carries it in `shardmill/workflow`. A wheel built
from the source distribution is the one built from the clone, since the source distribution carries the commit. The
wheel contains the portable engine too, so installing it asks an index for no name of ours.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WORKFLOW = ("Snakefile", "rules", "scripts", "envs", "report", "configs", "profiles", "resources", "constraints.txt")
COMMIT = "commit.txt"


class CarryWorkflow(BuildHookInterface):  # type: ignore[type-arg]
    """Adds to what is not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the workflow and the commit to what is built.

        Args:
            version: "editable" or "standard".
            build_data: what hatchling knows of the build, which is added to.
        """
        if version != "standard":
            return
        wheel = self.target_name == "wheel"
        folder = "shardmill/workflow/" if wheel else ""
        included = build_data["force_include"]
        if wheel:
            included |= {str(Path(self.root, name)): folder + name for name in WORKFLOW}
        else:  # hatchling walks into the link `config` first, and then into its target no more
            included[str(Path(self.root, "configs"))] = "configs"
        commit = _commit(Path(self.root))
        if commit:
            self.scratch = tempfile.TemporaryDirectory()
            file = Path(self.scratch.name, COMMIT)
            file.write_text(f"{commit}\n")
            included[str(file)] = folder + COMMIT

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written for the build."""
        if hasattr(self, "scratch"):
            self.scratch.cleanup()


def _commit(root: Path) -> str:
    """Return the commit of a clone whose files are its own, or of a source distribution.

    Empty where it is not known.
    """
    if not (root / ".git").exists():
        return (root / COMMIT).read_text().strip() if (root / COMMIT).is_file() else ""
    try:
        return "" if _git(root, "status", "--porcelain", "--untracked-files=no") else _git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *words: str) -> str:
    return subprocess.run(("git", "-C", str(root), *words), capture_output=True, text=True, check=True).stdout.strip()
