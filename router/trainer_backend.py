"""The interface to what publishes for an unmodified trainer; `policyline` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Loaded:
    """The version that a trainer's load published."""

    version: int
    name: str
    """The policy name that replicas serve it under."""


class LoadRefused(Exception):
    """The adapter that a trainer wants to load cannot be published.

    Args:
        status: HTTP status for the trainer.
        message: the reason.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class TrainerBackend(Protocol):
    """Publishes what trainers save, and knows the version behind each of their names."""

    async def load(self, run: str, name: str, path: str) -> Loaded:
        """Publish the adapter in the directory `path` as the line's next version of `run`.

        Raises:
            LoadRefused: it cannot be published.
        """

    async def knows(self, run: str) -> bool:
        """Whether the run was ever opened on this line.

        Raises:
            LedgerUnavailable: it is not known here and the ledger cannot be reached.
        """

    async def version(self, run: str, name: str) -> int | None:
        """The version that a trainer's name means now; None when it was not loaded.

        Raises:
            LedgerUnavailable: it is not known here and the ledger cannot be reached.
        """

    async def unload(self, run: str, name: str) -> None:
        """The trainer dropped the name. Unloads nothing: the window decides that."""

    async def pause(self, run: str) -> bool:
        """Pause generation for the trainer; whether it is paused now."""

    async def resume(self, run: str) -> None:
        """Resume generation."""

    async def close(self) -> None:
        """Release all resources."""
