"""vLLM servers as children of this process: the real one, and a double that imitates it."""
