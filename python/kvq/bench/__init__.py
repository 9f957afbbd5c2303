"""Speed of a compiled model: cache schemes side by side in one run."""
