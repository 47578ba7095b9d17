"""Tests of shardmill.evidence."""
