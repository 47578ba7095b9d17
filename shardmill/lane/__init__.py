"""What measures a kit on a device: it needs coremltools and numpy, Python 3.10 or newer, and nothing of shardmill.

`shardmill device kit` packs these files beside `measure.py`, where the package is called `lane`. So nothing in here may
import anything else of this repository. `main` is the process that a person starts. It loads no model: every
measurement is made in a child (`child`), which may die or hang, and is a line in a file as soon as it is finished.
"""
