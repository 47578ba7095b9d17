"""Make a Python on Linux look like one on a Mac with Apple silicon.

Packages that bring Linux binaries go on seeing Linux.

What is changed is what Python code can see: names of the system, functions that macOS lacks, /proc and /sys, units,
programs that a Mac can't run, and coremltools' native module (native/libcoremlpython.py), which Linux lacks.
"""

from __future__ import annotations


def pretend() -> None:
    """Change this process. Called once; the order matters, for modules ask for the platform as they are imported."""
    from simulated_mac import names

    names.rename()
    from simulated_mac import functions

    functions.change()
    names.change()
    from simulated_mac import coreml, files, processes

    files.hide()
    processes.watch()
    coreml.offer()
