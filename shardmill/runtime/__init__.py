"""A built model, loaded: its manifest, its programs, and the engine that runs them."""
