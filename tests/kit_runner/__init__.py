"""Tests of shardmill.kit_runner, in the process of the test; tests/device runs it as a person does."""
