"""The interface to what publishes for an unmodified trainer; `policyline` implements it."""

from __future__ import annotations

from typing import Final, Protocol

LOAD_REFUSED: Final = "load_refused"
"""Code of the error when the adapter that a trainer wants to load cannot be published."""


class TrainerBackend(Protocol):
    """Publishes what trainers save, and knows the version behind each of their names."""

    async def load(self, run: str, name: str, path: str) -> int:
        """Publish the adapter in the directory `path` as the line's next version of `run`.

        Raises:
            HttpRefused: it cannot be published.
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

    async def pause(self, run: str) -> bool:
        """Pause generation for the trainer; whether it is paused now."""

    async def resume(self, run: str) -> None:
        """Resume generation."""

    async def close(self) -> None:
        """Release all resources."""
