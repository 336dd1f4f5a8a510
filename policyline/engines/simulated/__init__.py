"""A double of vLLM 0.32 as far as adapters are concerned: light, fast, and able to misbehave."""
