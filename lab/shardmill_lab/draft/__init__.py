"""Training of an EAGLE-3 head on what a model computes for a text, on the CPU."""
