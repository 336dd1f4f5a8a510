"""Errors that end a sidecar; what can be retried is no error but an outcome (`execute`).

    WatcherError
    ├── CacheUnusable        the cache directory cannot be written
    ├── CacheInUse           another sidecar uses the same cache directory
    ├── SlotsShort           the engine's max_loras is below what the run's window needs
    ├── RuntimeLoadingOff    the engine cannot load adapters at run time
    ├── EngineRefusesUs      the engine wants another API key
    ├── LedgerReplaced       the ledger behind the URL is another one than at the start
    ├── ReplicaInUse         another sidecar serves this replica and is running
    └── ReplicaTakenOver     a newer sidecar serves this replica

Errors of engine calls have a root of their own, `policyline.watcher.vllm.errors.EngineError`.
"""

from __future__ import annotations

from policyline.errors import ExitCode, PolicylineError


class WatcherError(PolicylineError):
    """Root of the watcher's errors."""


class CacheUnusable(WatcherError):
    """The cache directory cannot be written."""

    exit_code = ExitCode.UNREACHABLE


class CacheInUse(WatcherError):
    """Another sidecar uses the same cache directory: each would delete the other's files."""


class SlotsShort(WatcherError):
    """The engine has fewer adapter slots than window and candidate need."""

    def __init__(self, *, max_loras: int, max_staleness: int, run: str) -> None:
        self.max_loras = max_loras
        self.needed = max_staleness + 2
        super().__init__(
            f"vLLM has --max-loras {max_loras}, run {run!r} with max_staleness {max_staleness} "
            f"needs {self.needed} (current, {max_staleness} before it, and the candidate)",
            hint=f"start vLLM with --max-loras {self.needed} or more",
        )


class RuntimeLoadingOff(WatcherError):
    """The engine cannot load adapters at run time."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"vLLM at {url} does not load adapters at run time",
            hint="start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        )


class EngineRefusesUs(WatcherError):
    """The engine wants another API key."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"vLLM at {url} refuses the API key",
            hint="set POLICYLINE_VLLM_API_KEY to the key that vLLM was started with",
        )


class LedgerReplaced(WatcherError):
    """The ledger behind the URL is another one than at the start."""

    def __init__(self, shown_url: str, *, was: str, found: str) -> None:
        super().__init__(
            f"ledger {shown_url} was {was} and is {found} now; nothing was unloaded",
            hint="restore the former ledger, or restart vLLM and this sidecar",
        )


class ReplicaInUse(WatcherError):
    """Another sidecar serves this replica and is running."""

    def __init__(self, replica: str, *, holder: str, since: str, url: str) -> None:
        super().__init__(
            f"replica {replica!r} is served by {holder} since {since}, at {url}",
            hint="give this sidecar another --replica, stop the other one, or pass --replace",
        )


class EngineInUse(WatcherError):
    """Another sidecar serves this engine under another name and is running."""

    def __init__(self, url: str, *, replica: str, holder: str) -> None:
        super().__init__(
            f"the engine at {url} is served as replica {replica!r} by {holder}",
            hint="one sidecar serves an engine: stop that one, or give this one another --vllm",
        )


class ReplicaTakenOver(WatcherError):
    """A newer sidecar speaks for this replica."""

    def __init__(self, replica: str, *, generation: int, newer: int) -> None:
        super().__init__(
            f"replica {replica!r} has a newer sidecar (generation {newer}, this one is "
            f"{generation})",
            hint="give each sidecar its own --replica",
        )
