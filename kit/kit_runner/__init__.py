"""The program that measures a kit on a device. It needs coremltools, numpy and Python 3.10 or newer, not shardmill.

`shardmill device kit` packs these files as they are, with `measure.py` beside them. So nothing in here may import
anything else of this repository. `main` is the process that a person starts. It loads no model: every measurement runs
in a child process (`child`), which may die or hang, and is a line in a file as soon as it is finished.
"""

__version__ = "0.1.0"
