"""Tests of shardmill.decode."""
