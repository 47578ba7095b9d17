"""Stamped conversion: a part is composed from templates, which are derived from small samples."""
