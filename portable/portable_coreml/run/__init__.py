"""Execution: lowers a program, specialises it to the shapes of a run, and computes it with torch on the CPU."""
