"""Commands of the lab: a drafter trained, a checkpoint rotated, a checkpoint of random weights.

shardmill's wheel and its editable install bring this package, and its commands import it only when they are called.
"""
