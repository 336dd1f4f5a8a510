"""The progress of a replay, in a file, so that it can go on after it was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

from policyline.replay_into.errors import StateInvalid
from policyline.replay_into.model import Outcome, Replayed

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
class ReplayProgress:
    """Versions that are done, and the one that is loaded."""

    done: Mapping[int, Replayed] = field(default_factory=dict)
    loaded: LoadedAdapter | None = None


class StateFile:
    """Stores the progress of one replay; without a path only in memory.

    Args:
        path: of the file; it is replaced as a whole at every change.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._subject: Subject | None = None
        self.progress = ReplayProgress()

    def open(self, subject: Subject) -> None:
        """Read the progress of an earlier process, if the file exists.

        Raises:
            StateInvalid: it cannot be read or written, or belongs to another replay.
        """
        self._subject = subject
        if self._path is None:
            return
        if self._path.exists():
            self.progress = self._read(self._path, subject)
        self._write()

    def record_loaded(self, adapter: LoadedAdapter) -> None:
        """Record, before the load, what will have to be unloaded."""
        self._change(replace(self.progress, loaded=adapter))

    def record_unloaded(self) -> None:
        """Record that nothing of this replay is loaded."""
        self._change(replace(self.progress, loaded=None))

    def finish(self, result: Replayed) -> None:
        """Record the result of a version."""
        done = {**self.progress.done, result.version: result}
        self._change(replace(self.progress, done=done))

    def _change(self, progress: ReplayProgress) -> None:
        self.progress = progress
        self._write()

    def _write(self) -> None:
        if self._path is None or self._subject is None:
            return
        content = {
            "schema": SCHEMA,
            "subject": asdict(self._subject),
            "loaded": None if self.progress.loaded is None else asdict(self.progress.loaded),
            "done": [asdict(result) for _, result in sorted(self.progress.done.items())],
        }
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            with fresh.open("w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError as error:
            raise StateInvalid(
                f"state file {self._path} cannot be written: {error.strerror}",
                hint="choose another --state",
            ) from error

    @staticmethod
    def _read(path: Path, subject: Subject) -> ReplayProgress:
        try:
            content = json.loads(path.read_text())
            found = Subject(**content["subject"])
            progress = ReplayProgress(
                done={entry["version"]: _result(entry) for entry in content["done"]},
                loaded=None if content["loaded"] is None else LoadedAdapter(**content["loaded"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateInvalid(
                f"state file {path} cannot be read: {error!s:.100}",
                hint="choose another --state, or remove it to start again",
            ) from error
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
        return progress


def _result(entry: Mapping[str, Any]) -> Replayed:
    result = Replayed(**entry)
    if result.outcome not in get_args(Outcome):
        raise ValueError(f"unknown outcome {result.outcome!r}")
    return result
