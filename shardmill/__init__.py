"""Core ML programs for the Apple Neural Engine from Hugging Face LLM checkpoints: build, gate, benchmark."""

__version__ = "0.1.0"
