"""Judgement without execution: type and shape checks, what Core ML refuses to load, and where operations would run."""
