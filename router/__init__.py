"""Rollout side: the gated, prefix-affine proxy, and the surface for an unmodified trainer."""

from router.app import Router, create_app
from router.settings import RouterSettings

__all__ = ["Router", "RouterSettings", "create_app"]
