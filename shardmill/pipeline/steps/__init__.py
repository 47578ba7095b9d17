"""The steps: each says what a job of it would do. Nothing heavy is imported at the top of one."""
