"""What the router needs of whoever publishes for an unmodified trainer; composed in policyline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a trainer's load became."""

    version: int
    name: str
    """The policy name: what replicas serve it as."""


class LoadRefused(Exception):
    """The adapter that a trainer named cannot be published.

    Args:
        status: HTTP status for the trainer.
        message: why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Trainer(Protocol):
    """Publishes what trainers save, and knows which version each of their names means."""

    async def load(self, run: str, name: str, path: str) -> Loaded:
        """Publish the adapter in the directory `path` as the line's next version of `run`.

        Raises:
            LoadRefused: it cannot be published.
        """

    async def knows(self, run: str) -> bool:
        """Whether the run was ever opened on this line.

        Raises:
            LedgerUnavailable: it is not known here and the ledger is away.
        """

    async def version(self, run: str, name: str) -> int | None:
        """The version that a trainer's name means now; None when it was not loaded.

        Raises:
            LedgerUnavailable: it is not known here and the ledger is away.
        """

    async def unload(self, run: str, name: str) -> None:
        """The trainer needs the name no more. Only noted: the window decides what is unloaded."""

    async def pause(self, run: str) -> bool:
        """The trainer pauses generation; whether it did pause."""

    async def resume(self, run: str) -> None:
        """The trainer resumes generation."""

    async def close(self) -> None:
        """Give back what is held."""
