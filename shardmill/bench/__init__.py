"""Measurements of a built model, in one resident process."""
