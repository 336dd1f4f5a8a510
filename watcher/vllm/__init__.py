"""The vLLM server beside this sidecar: its HTTP calls, answers and errors."""
