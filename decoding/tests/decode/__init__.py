"""Tests of drafted_decoding."""
