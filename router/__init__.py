"""Rollout side: the gated, prefix-affine proxy. Not built yet."""
