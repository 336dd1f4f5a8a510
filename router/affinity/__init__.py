"""Which replica holds a prompt's KV prefix."""
