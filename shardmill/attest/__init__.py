"""Statements about a build that other tools can read: in-toto statements of SLSA provenance and of test results."""
