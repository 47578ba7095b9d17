"""Parts of a checkpoint -> canonical Core ML packages."""
