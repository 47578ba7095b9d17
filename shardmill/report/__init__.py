"""One page for a person: what was built, what its gates measured, what was only predicted or not run."""
