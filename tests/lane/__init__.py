"""Tests of shardmill.lane, in the process of the test; tests/device runs it as a person does."""
