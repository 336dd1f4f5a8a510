"""The vLLM server next to this sidecar: its HTTP calls, answers and errors."""
