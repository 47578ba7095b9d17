"""Tests of shardmill.media."""
