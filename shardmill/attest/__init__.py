"""What is said of a build, in the words that others' tools read: in-toto statements of SLSA and of test results."""
