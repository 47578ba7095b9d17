"""Pictures and sounds on their way into a model: checked, decoded, and turned into columns of numbers."""
