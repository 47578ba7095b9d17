"""A second engine, made by Apple: Core AI's runtime, which also runs on Linux, computes a build's parts."""
