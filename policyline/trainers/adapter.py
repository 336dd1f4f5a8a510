"""The trainer backend of the router: publishes what an unmodified trainer saves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from policyline.ledger import events as kinds
from policyline.ledger.errors import LedgerError, LedgerUnavailable, NotFound, StaleEpoch
from policyline.ledger.manifest import Manifest
from policyline.ledger.names import policy_name
from policyline.ledger.store import Ledger
from policyline.publisher.check.source import inspect
from policyline.publisher.errors import CheckFailed, PublisherError
from policyline.publisher.publisher import Publisher
from policyline.router.answers import HttpRefused
from policyline.router.trainer_backend import LOAD_REFUSED
from policyline.single_flight import SingleFlight
from policyline.storage import Storage, StorageError
from policyline.trainers.names import TRAINER_NAME, TRAINER_SESSION, TrainerNames
from policyline.trainers.settings import TrainerSettings

log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
"""Between two checks whether a version is ready; a load takes a few tenths of a second."""


@dataclass(slots=True)
class _Run:
    """The state of one run in this process."""

    names: TrainerNames = field(default_factory=TrainerNames)
    seen_seq: int = 0
    """`names` follows from the events up to this one."""
    naming: threading.Lock = field(default_factory=threading.Lock)
    """Guards both; locked for one read of the ledger at most."""
    publisher: Publisher | None = None
    publishing: threading.Lock = field(default_factory=threading.Lock)
    """Locked while a version is published: a run's loads go one at a time."""


class TrainerAdapter:
    """Publishes for unmodified trainers, every run of one line. Blocking work is done in threads.

    Args:
        ledger: where versions are published; stays open when this closes.
        storage: where their bytes go.
        settings: see `TrainerSettings`.
    """

    def __init__(
        self, ledger: Ledger, storage: Storage, settings: TrainerSettings | None = None
    ) -> None:
        self._ledger = ledger
        self._storage = storage
        self._settings = settings or TrainerSettings()
        self._reads: SingleFlight[str, None] = SingleFlight()
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        self._opened: set[str] = set()
        """Runs known to be of this line, open or closed."""

    async def load(self, run: str, name: str, path: str) -> int:
        """Publish the adapter in the directory `path` as the line's next version of `run`.

        Raises:
            HttpRefused: it cannot be published, or every replica rejects it.
            LedgerUnavailable: the ledger does not answer.
        """
        version = await asyncio.to_thread(self._load, run, name, Path(path))
        if self._settings.waits:
            await self._until_ready(version)
        return version

    async def knows(self, run: str) -> bool:
        """Whether the run was ever opened on this line. Reads the ledger until it was.

        Raises:
            LedgerUnavailable: it is not known here and the ledger does not answer.
        """
        if run not in self._opened and await asyncio.to_thread(self._is_opened, run):
            self._opened.add(run)
        return run in self._opened

    async def version(self, run: str, name: str) -> int | None:
        """The version that a trainer's name means now; None when it was not loaded.

        Reads the ledger, since another router may have published under this name a moment ago.
        While the ledger is unavailable nobody can publish, so the last known version is right.

        Raises:
            LedgerUnavailable: it is not known here and the ledger does not answer.
        """
        known = self._runs[run]
        try:
            await self._reads.fresh(run, lambda: asyncio.to_thread(self._refresh, run, known))
        except LedgerUnavailable:
            if name not in known.names.versions:
                raise
        named = known.names.versions.get(name)
        return None if named is None else named.version

    async def pause(self, run: str) -> bool:
        """Pause the fleet, if `forward_pause` is set and the line exists; whether it did."""
        if not self._settings.forward_pause:
            return False
        try:
            await asyncio.to_thread(self._ledger.pause, self._settings.line, f"trainer of {run}")
        except NotFound:  # nothing was opened yet
            return False
        return True

    async def resume(self, run: str) -> None:
        """Resume the fleet, if `forward_pause` is set and the line exists."""
        del run
        if self._settings.forward_pause:
            try:
                await asyncio.to_thread(self._ledger.resume, self._settings.line)
            except NotFound:
                return

    async def close(self) -> None:
        """Release the epochs, so that the next router needs no take-over."""
        for known in self._runs.values():
            if known.publisher is not None:
                await asyncio.to_thread(known.publisher.close)

    def _is_opened(self, run: str) -> bool:
        try:
            return self._ledger.run(run).line == self._settings.line
        except NotFound:
            return False

    def _load(self, run: str, name: str, directory: Path) -> int:
        known = self._runs[run]
        with known.publishing:
            try:
                return self._publish(run, known, name, directory)
            except CheckFailed as error:
                raise HttpRefused(400, LOAD_REFUSED, str(error)) from error
            except (StorageError, PublisherError) as error:
                raise HttpRefused(500, LOAD_REFUSED, str(error)) from error
            except LedgerUnavailable:
                raise
            except LedgerError as error:
                raise HttpRefused(409, LOAD_REFUSED, str(error)) from error

    def _publish(self, run: str, known: _Run, name: str, directory: Path) -> int:
        digest = inspect(directory).digest()
        self._refresh(run, known)
        again = known.names.retried(name, digest)
        if again is not None:
            return again.version
        metadata = {TRAINER_NAME: name, TRAINER_SESSION: known.names.session_for(name)}
        try:
            published = self._publisher(run, known).publish(directory, metadata=metadata)
        except StaleEpoch as error:
            # after a rollback this load must fail; the next one claims a new epoch
            known.publisher = None
            if error.holder is None:
                raise
            published = self._publisher(run, known).publish(directory, metadata=metadata)
        with known.naming:
            known.names.take(published.version, published.digest, metadata)
        return published.version

    def _publisher(self, run: str, known: _Run) -> Publisher:
        if known.publisher is None:
            self._refuse_during_another(run)
            known.publisher = Publisher(
                self._ledger,
                self._storage,
                run=run,
                line=self._settings.line,
                settings=self._settings.run,
                take_over=True,  # the trainer sends its loads to this router now
            )
        return known.publisher

    def _refuse_during_another(self, run: str) -> None:
        """Refuse to open a run, which would end the open run of the line, while that one trains.

        Raises:
            HttpRefused: the open run has published within `follow_after_s`.
        """
        line = self._settings.line
        other = self._ledger.view(line).run
        if other is None or other.run == run or other.holder is None:
            return
        published = [v.published_at for v in self._ledger.versions(run=other.run) if v.published_at]
        last = datetime.fromisoformat(published[-1] if published else other.claimed_at)
        quiet_s = (datetime.now(UTC) - last).total_seconds()
        if quiet_s < self._settings.follow_after_s:
            raise HttpRefused(
                409,
                LOAD_REFUSED,
                f"run {other.run!r} of line {line!r} is in training: {other.holder} holds it, and "
                f"it published {quiet_s:.0f} s ago. Is {run!r} in the trainer's URL the run that "
                f"you mean? A new run may follow after {self._settings.follow_after_s:g} quiet "
                f"seconds (--follow-after), or after: policyline ledger close-run {other.run}",
            )

    def _refresh(self, run: str, known: _Run) -> None:
        """Fold in what any router has published since the last read."""
        with known.naming:
            try:
                found = self._ledger.events(
                    after=known.seen_seq, run=run, kinds=(kinds.VERSION_PUBLISHED,)
                )
                for event in found:
                    manifest = Manifest.from_text(event.data["manifest"])
                    known.names.take(manifest.version, manifest.digest, manifest.metadata)
                    known.seen_seq = event.seq
            except NotFound:  # the run was not opened yet
                return

    async def _until_ready(self, version: int) -> None:
        """Wait until the version is current, for at most `ready_wait_s`.

        Raises:
            HttpRefused: it was withdrawn or rejected.
        """
        deadline_s = time.monotonic() + self._settings.ready_wait_s
        line = self._settings.line
        name = policy_name(line, version)
        while time.monotonic() < deadline_s:
            view = await asyncio.to_thread(self._ledger.view, line, [version])
            if view.current is not None and view.current >= version:
                return
            row = view.others.get(version)
            if row is not None and row.state in {"withdrawn", "rejected"}:
                why = f"{name} was {row.state}: {row.reason}"
                raise HttpRefused(500, LOAD_REFUSED, why)
            await asyncio.sleep(_POLL_S)
        log.warning(
            "%s was not ready within %g s",
            name,
            self._settings.ready_wait_s,
            extra={"event": "trainer_not_ready", "version": version},
        )
