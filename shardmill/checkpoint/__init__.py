"""Checkpoints in Hugging Face layout: fetch them, read their headers, hash their bytes, or synthesise one.

`fetch` brings files in and records them, `headers` says which tensor lies where, `expect` compares that with
what a config promises, `hashing` says what the bytes are. Nothing here holds a whole weight file in memory.
"""
