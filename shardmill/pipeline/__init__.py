"""The DAG: its table of steps, the store of what was built, and what each job does."""
