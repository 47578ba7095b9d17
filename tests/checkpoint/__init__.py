"""Checkpoints: fetched, read, hashed, synthesised."""
