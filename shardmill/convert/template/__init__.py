"""Stamped conversion: a part is composed from templates that small samples of its layers give."""
