"""The replica side: makes one vLLM server serve what the ledger desires, and records it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyline.watcher.loop import Sidecar
    from policyline.watcher.settings import SidecarSettings

__all__ = ["Sidecar", "SidecarSettings"]


def __getattr__(name: str) -> Any:
    # lazy, so that the command line can name the watcher's errors without an HTTP server
    if name == "Sidecar":
        from policyline.watcher import loop  # noqa: PLC0415 - see above

        return loop.Sidecar
    if name == "SidecarSettings":
        from policyline.watcher import settings  # noqa: PLC0415 - see above

        return settings.SidecarSettings
    raise AttributeError(f"module 'policyline.watcher' has no attribute {name!r}")
