"""Checkpoints in Hugging Face layout: fetch them, read their headers, hash their bytes.

`fetch` brings files in and records them. `headers` finds the bytes of each tensor, and compares the tensors with
what a config describes. `hashing` hashes the bytes. Nothing here holds a whole weight file in memory.
"""
