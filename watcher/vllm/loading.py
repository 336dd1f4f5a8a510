"""The load path: how an engine is made to serve a version, and how that is seen.

A sidecar and `ledger replay --into` share it, so that a replay shows what a sidecar would do.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass

from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import Manifest
from policyline.ledger.probe import PROBE_TOKENS
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterAlreadyLoaded, EngineTimeout


@dataclass(frozen=True, slots=True)
class Seen:
    """A version that the engine lists with our path and answers for."""

    probe: tuple[float, ...]
    """Log-probabilities (natural log) of the probe's tokens."""
    probe_s: float


@functools.lru_cache(maxsize=16)
def read_manifest(text: str, *, name: str, digest: str, max_size_bytes: int) -> Manifest:
    """The manifest of a version, distrusted; remembered, as each step of a version asks for it.

    Raises:
        ManifestInvalid: it must not be believed, speaks of another version, or claims too much.
    """
    manifest = Manifest.from_text(text)
    if manifest.name != name or manifest.digest != digest:
        raise ManifestInvalid(f"the manifest of {name} speaks of {manifest.name}")
    if manifest.size_bytes > max_size_bytes:
        raise ManifestInvalid(
            f"{name} claims {manifest.size_bytes} bytes, allowed are {max_size_bytes}"
        )
    return manifest


async def load(engine: EngineClient, name: str, path: str) -> bool:
    """Load a local copy; whether the engine answered. Either way its list decides what is served.

    Raises:
        EngineError: it was refused, or the connection broke.
    """
    try:
        await engine.load(name, path)
    except AdapterAlreadyLoaded:
        return True
    except EngineTimeout:
        return False
    return True


async def see(engine: EngineClient, name: str, path: str) -> Seen | None:
    """The probe under a name; None when the engine does not list the name with this path.

    Raises:
        EngineError: the engine does not answer, or not with finite values.
    """

    async def probe() -> Seen:
        started = time.perf_counter()
        values = await engine.score(name, PROBE_TOKENS)
        return Seen(values, time.perf_counter() - started)

    models, seen = await asyncio.gather(engine.models(), probe(), return_exceptions=True)
    if isinstance(models, BaseException):
        raise models
    if not any(a.name == name and a.path == path for a in models.adapters):
        return None
    if isinstance(seen, BaseException):
        raise seen
    return seen
