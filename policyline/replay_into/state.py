"""The progress of a replay, in a file, so that it can go on after it was killed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from policyline.replay_into.errors import StateInvalid
from policyline.replay_into.model import Replayed

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """What is replayed on which server: a state file belongs to one."""

    ledger_id: str
    run: str
    url: str
    build: str
    """Of the engine: probes of two builds are not mixed."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The version that is, or may be, loaded on the server."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class _Content:
    """What the file holds, as JSON."""

    subject: Subject
    loaded: LoadedAdapter | None
    done: tuple[Replayed, ...]
    schema: int = SCHEMA


class StateFile:
    """Stores the progress of one replay; without a path only in memory.

    Args:
        path: of the file; it is replaced as a whole at every change.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._subject: Subject | None = None
        self.done: dict[int, Replayed] = {}
        self.loaded: LoadedAdapter | None = None

    def open(self, subject: Subject) -> None:
        """Read the progress of an earlier process, if the file exists.

        Raises:
            StateInvalid: it cannot be read or written, or belongs to another replay.
        """
        self._subject = subject
        if self._path is not None and self._path.exists():
            self._read(self._path, subject)
        self._write()

    def record_loaded(self, adapter: LoadedAdapter | None) -> None:
        """Record, before a load, what will have to be unloaded; None once it is."""
        self.loaded = adapter
        self._write()

    def finish(self, result: Replayed) -> None:
        """Record the result of a version."""
        self.done[result.version] = result
        self._write()

    def _write(self) -> None:
        if self._path is None or self._subject is None:
            return
        done = tuple(result for _, result in sorted(self.done.items()))
        content = msgspec.json.encode(_Content(self._subject, self.loaded, done))
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            with fresh.open("wb") as file:
                file.write(msgspec.json.format(content, indent=1))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError as error:
            raise StateInvalid(
                f"state file {self._path} cannot be written: {error.strerror}",
                hint="choose another --state",
            ) from error

    def _read(self, path: Path, subject: Subject) -> None:
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_Content)
        except (OSError, ValueError) as error:
            raise StateInvalid(
                f"state file {path} cannot be read: {error!s:.100}",
                hint="choose another --state, or remove it to start again",
            ) from error
        found = content.subject
        if found != subject:
            differs = [
                f"{name} {getattr(found, name)!r}, not {getattr(subject, name)!r}"
                for name in Subject.__slots__
                if getattr(found, name) != getattr(subject, name)
            ]
            raise StateInvalid(
                f"state file {path} belongs to another replay: it has {'; '.join(differs)}",
                hint="give each replay its own --state, or remove it to start again",
            )
        self.loaded = content.loaded
        self.done = {result.version: result for result in content.done}
