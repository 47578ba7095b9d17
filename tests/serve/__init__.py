"""Tests of shardmill.serve."""
