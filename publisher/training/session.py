"""The publishing of one training run, on rank 0: open, save, submit, finish, close."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from policyline.ledger.db.migrate import create_if_missing as create_ledger_if_missing
from policyline.ledger.errors import NotFound
from policyline.ledger.manifest import Manifest
from policyline.ledger.names import policy_name
from policyline.ledger.probe import TRAINER_REFERENCE
from policyline.ledger.store import Ledger
from policyline.publisher.errors import NotSupported, PublishingBlocked
from policyline.publisher.model import Published
from policyline.publisher.publisher import Publisher
from policyline.publisher.settings import PublishTo
from policyline.publisher.training.publish_thread import PublishThread, Saved
from policyline.publisher.training.step_logs import StepLogs, ratio_flag
from policyline.storage import create_if_missing as create_storage_if_missing
from policyline.storage import open_storage

log = logging.getLogger(__name__)


class Session:
    """Opens ledger, storage and run, and publishes in a thread of its own.

    Args:
        to: where and how.
        max_staleness: of the trainer, in versions; must be the run's.
        base_model: directory of the base model, to check against; anything else checks nothing.
        staging: local directory for saved adapters.
        resumed: from the checkpoint that training resumes: `checkpoint_step` and
            `parent_version`, as far as known.
        on_published: called after each publication, in the publishing thread.

    Raises:
        NotSupported: the run was opened with another `max_staleness`.
        LedgerError, StorageError, PublisherError: as `Publisher`.
    """

    def __init__(
        self,
        to: PublishTo,
        *,
        max_staleness: int,
        base_model: str,
        staging: Path,
        resumed: Mapping[str, Any],
        on_published: Callable[[Saved, Published], None] = lambda _saved, _published: None,
    ) -> None:
        self.to = to
        self.logs = StepLogs()
        self._on_published = on_published
        self._resumed = dict(resumed)
        self._parent: int | None = None
        self._syncs = 0
        self._pending: Saved | None = None
        """Saved, and waits for the log of its step."""
        self._stepping_since = time.perf_counter()
        storage = open_storage(to.storage)
        create_ledger_if_missing(to.ledger)
        create_storage_if_missing(to.storage)
        self.ledger = Ledger(to.ledger)
        try:
            self._check_run(max_staleness)
            self._parent = self._at_checkpoint()
            if self._parent is not None:
                self._resumed["parent_version"] = self._parent
            self._publisher = Publisher(
                self.ledger,
                storage,
                run=to.run,
                line=to.line,
                settings=to.rules(max_staleness),
                parent_run=to.parent_run,
                parent_version=self._parent_version(),
                lineage=self._resumed,
                take_over=to.take_over,
                base_model=base_model,
                max_lora_rank=to.max_lora_rank,
            )
        except BaseException:
            self.ledger.close()
            raise
        self._storage = storage
        staging.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=f"{to.run}-", dir=staging))
        self.thread = PublishThread(self._publish, self._published)

    def _check_run(self, max_staleness: int) -> None:
        try:
            present = self.ledger.run(self.to.run)
        except NotFound:
            return
        if present.max_staleness != max_staleness:
            raise NotSupported(
                f"run {self.to.run!r} was opened with max_staleness {present.max_staleness}, the "
                f"trainer has {max_staleness}",
                hint="give the trainer the run's value, or open a new run",
            )

    def _at_checkpoint(self) -> int | None:
        """The version that has the checkpoint's weights.

        A checkpoint names the newest version published when it was saved; the version of its own
        step may have come later.
        """
        known: int | None = self._resumed.get("parent_version")
        step = self._resumed.get("checkpoint_step")
        for row in reversed(self.ledger.versions(run=self.to.parent_run or self.to.run)):
            if row.manifest is None or row.version < (known or 0):
                continue
            if Manifest.from_text(row.manifest).metadata.get("step") == step:
                return row.version
        return known

    def _parent_version(self) -> int | None:
        """For a fork: the given one, or the checkpoint's if it belongs to the parent run."""
        if self.to.parent_version is not None or self.to.parent_run is None:
            return self.to.parent_version
        rows = self.ledger.versions(run=self.to.parent_run)
        known = {row.version for row in rows if row.digest is not None}
        return self._parent if self._parent in known else None

    def save(
        self,
        write: Callable[[Path], object],
        facts: Mapping[str, Any],
        gather_s: float,
        reference: Future[list[float]] | None = None,
    ) -> None:
        """Save an adapter, for `submit` to publish.

        The two are separate because a trainer logs a step only after its last callback, and the
        version carries the logged values.

        Args:
            write: writes the adapter into the empty directory it is given, as PEFT does.
            facts: recorded with the version, with what the logs say.
            gather_s: seconds that gathering the adapter took.
            reference: gets the trainer's log-probabilities for the probe; recorded as well.
        """
        started = time.perf_counter()
        directory = Path(tempfile.mkdtemp(prefix="sync-", dir=self._staging))
        write(directory)
        phases = {"gather": gather_s, "save": time.perf_counter() - started}
        self._pending = Saved(self._syncs, directory, facts, phases, reference)

    def submit(self) -> int | None:
        """Publish what `save` saved, in the publishing thread.

        Returns:
            The sync's number, counted from 0; None when nothing was saved since.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._syncs += 1
        resumed = {} if pending.sync else self._resumed
        metadata = {**resumed, **pending.metadata, **self.logs.take()}
        self._flag(metadata)
        now = time.perf_counter()
        step_s = now - self._stepping_since - sum(pending.phases.values())
        phases = {"train_step": step_s, **pending.phases}
        metadata["phases"] = {name: round(s, 6) for name, s in phases.items()}
        self._stepping_since = now
        self.thread.submit(replace(pending, metadata=metadata, phases=phases))
        return pending.sync

    def _flag(self, metadata: dict[str, Any]) -> None:
        if self._parent is None:
            return
        after = policy_name(self.to.line, self._parent)
        flag = ratio_flag(metadata.get("ratio"), self.to.ratio_tolerance, after)
        if flag is not None:
            metadata["flag"] = flag
            log.warning("%s", flag, extra={"event": "ratio_off", "after": after})

    def raise_failure(self) -> None:
        """Raise what ended publishing, if something did."""
        if self.thread.failure is not None:
            raise self.thread.failure

    def finish(self) -> None:
        """Wait until everything that was submitted is published.

        Raises:
            PublishingBlocked: ledger or storage stay unavailable for `ready_timeout_s`.
            Exception: what ended publishing.
        """
        in_time = self.thread.drain(self.to.ready_timeout_s)
        self.raise_failure()
        if not in_time:
            raise PublishingBlocked(
                f"the last version could not be published: {self.thread.blocked}",
                hint="bring it back and resume from the last checkpoint",
            )

    def close(self) -> None:
        """Finish what is in flight, drop what waits, release the epoch. Idempotent."""
        self.thread.close(self.to.ready_timeout_s)
        self._publisher.close()
        self.ledger.close()
        shutil.rmtree(self._staging, ignore_errors=True)

    def _publish(self, saved: Saved, attempt: int) -> Published:
        if attempt:
            self._storage.check_writable()  # before a number is reserved
        metadata = dict(saved.metadata)
        if self._parent is not None:
            metadata["parent_version"] = self._parent
        reference = saved.reference
        if reference is None:
            return self._publisher.publish(saved.directory, metadata=metadata, phases=saved.phases)

        def facts() -> Mapping[str, Any]:
            try:
                return {**metadata, TRAINER_REFERENCE: reference.result()}
            except CancelledError:  # training stopped while it scored: the version itself is good
                return metadata

        return self._publisher.publish(saved.directory, metadata=facts, phases=saved.phases)

    def _published(self, saved: Saved, published: Published) -> None:
        self._parent = published.version
        self._on_published(saved, published)
