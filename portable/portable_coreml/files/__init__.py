"""Model files: reads packages, specifications, weight files and compiled bundles, and writes bundles."""
