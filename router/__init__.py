"""Rollout side: the gated, prefix-affine proxy, and the surface for an unmodified trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyline.router.app import Router, create_app
    from policyline.router.settings import RouterSettings

__all__ = ["Router", "RouterSettings", "create_app"]


def __getattr__(name: str) -> Any:
    # lazy, so that errors and the pure parts can be imported without an HTTP library
    if name == "RouterSettings":
        from policyline.router import settings  # noqa: PLC0415 - see above

        return settings.RouterSettings
    if name in __all__:
        from policyline.router import app  # noqa: PLC0415 - see above

        return getattr(app, name)
    raise AttributeError(f"module 'policyline.router' has no attribute {name!r}")
