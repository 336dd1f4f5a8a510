"""Publishing: a saved adapter becomes a version of a run, once, durably, under fencing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from policyline.ledger.errors import Conflict, LedgerError, NotFound, StaleEpoch
from policyline.ledger.manifest import MANIFEST_NAME, FileEntry, Manifest, version_digest
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.probe import ZERO_INIT
from policyline.ledger.settings import RunSettings
from policyline.ledger.store import Claim, Ledger, Reservation
from policyline.publisher.check.base_model import read_layer_sizes
from policyline.publisher.check.previous import PreviousLayout
from policyline.publisher.check.source import WEIGHTS_NAME, Source, inspect
from policyline.publisher.check.staging import Filled, fill
from policyline.publisher.errors import CheckFailed, PublisherClosed
from policyline.publisher.model import Published, as_json, manifest_of
from policyline.publisher.sweep import check_known, sweep
from policyline.storage import Staging, Storage, StorageError, hash_file
from policyline.storage.files import write_new

log = logging.getLogger(__name__)

Metadata = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Publisher:
    """The one process that may publish to a run, until it closes or is fenced.

    Opening it opens the run or goes on with it, and sweeps what a predecessor that died left
    behind. Synchronous; one thread at a time.

    Args:
        ledger: where versions are recorded; stays open when this closes.
        storage: where their bytes go.
        run: the run's name.
        line: prefix of the versions' names.
        settings: rules of the run; count only when this opens it for the first time.
        parent_run: the run that this one goes on from, when it is new.
        parent_version: the version of it, where that is known.
        lineage: recorded with a new run: the checkpoint's step, ...
        take_over: fence a publisher that may still live.
        base_model: local directory of the base model, to check sizes and layer names against;
            anything else (a Hub id) and None check nothing.
        max_lora_rank: the servers' `--max-lora-rank`, to refuse what they would; None: not known.

    Raises:
        StorageUnwritable: before anything else is done.
        Refused: the run is closed, or a live publisher holds it.
        UnknownVersion: the storage holds versions of this line from another ledger.
        BaseModelInvalid: the base model's directory has no config.json.
    """

    def __init__(
        self,
        ledger: Ledger,
        storage: Storage,
        *,
        run: str,
        line: str = DEFAULT_LINE,
        settings: RunSettings | None = None,
        parent_run: str | None = None,
        parent_version: int | None = None,
        lineage: Mapping[str, Any] | None = None,
        take_over: bool = False,
        base_model: Path | str | None = None,
        max_lora_rank: int | None = None,
    ) -> None:
        self._base = None if base_model is None else read_layer_sizes(Path(base_model))
        self._max_lora_rank = max_lora_rank
        self._ledger = ledger
        self._storage = storage
        storage.check_writable()
        check_known(ledger, storage, line)
        self._claim = ledger.open_run(
            run,
            line=line,
            settings=settings,
            parent_run=parent_run,
            parent_version=parent_version,
            take_over=take_over,
            lineage=lineage,
        )
        self._closed = False
        self._unconfirmed: Manifest | None = None
        """In the storage, but whether its append was committed is not known."""
        self._previous = PreviousLayout(ledger, storage, line, run)
        try:
            sweep(ledger, storage, self._claim)
        except BaseException:
            self.close()
            raise

    @property
    def claim(self) -> Claim:
        """The epoch this publisher holds."""
        return self._claim

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the epoch back, so that the next publisher needs no take-over. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._ledger.release(self._claim)
            except LedgerError as error:  # the claim then stays until the next take-over
                log.warning("epoch %d was not released: %s", self._claim.epoch, error)

    def publish(
        self,
        directory: Path | str,
        *,
        metadata: Metadata | None = None,
        version: int | None = None,
        phases: Mapping[str, float] | None = None,
    ) -> Published:
        """Publish what PEFT saved in `directory`; returns when it is durable and committed (I5).

        The directory is only read. The same content again is a new version, unless `version`
        names one that has it already: then that is the answer.

        Args:
            directory: holds `adapter_config.json` and `adapter_model.safetensors`.
            metadata: recorded with the version: step, learning rate, ...; or a function that
                gives it, called when the files are staged, if it may take as long as that.
            version: a number of the caller's choice; default is the line's next.
            phases: seconds that the caller spent before (`train_step`, `gather`, `save`), recorded
                with this publication's own; a phase of both is their sum.

        Raises:
            CheckFailed: it cannot be served; nothing became visible. Faults that show without
                reading the tensors cost no version number.
            StaleEpoch: another publisher holds the run now.
            Conflict: `version` is taken by other bytes.
            StorageError: it could not be read or written.
            LedgerUnavailable: the ledger did not answer; if that was at the end, the next
                `publish` or opening finds out what came of it.
        """
        if self._closed:
            raise PublisherClosed(
                f"this publisher of run {self._claim.run!r} is closed", hint="open another"
            )
        self._retry_append()
        known = metadata if callable(metadata) else as_json(metadata or {})
        started = time.perf_counter()
        source = self._inspect(Path(directory))
        inspect_s = time.perf_counter() - started
        if version is not None:
            earlier = self._published_before(version, source)
            if earlier is not None:
                return earlier
        started = time.perf_counter()
        reservation = self._ledger.reserve(self._claim, version=version)
        reserve_s = time.perf_counter() - started
        manifest, spent = self._stage(reservation, source, known)
        spent["check"] += inspect_s
        spent["append"] = reserve_s
        for phase, duration_s in (phases or {}).items():
            spent[phase] = spent.get(phase, 0.0) + duration_s
        started = time.perf_counter()
        self._append(manifest, spent)
        spent["append"] += time.perf_counter() - started
        self._previous.remember(reservation.version, source.layout)
        log.info(
            "published %s",
            manifest.name,
            extra={"event": "published", "version": manifest.version, "digest": manifest.digest},
        )
        return self._result(manifest, spent)

    def _inspect(self, directory: Path) -> Source:
        source = inspect(directory, base=self._base, max_lora_rank=self._max_lora_rank)
        difference = self._previous.difference(source.layout)
        if difference:
            raise CheckFailed(
                directory / WEIGHTS_NAME,
                f"it differs from the version before: {difference}",
                hint="save the whole adapter; for another rank or other targets open a new run",
            )
        return source

    def _stage(
        self, reservation: Reservation, source: Source, metadata: Metadata
    ) -> tuple[Manifest, dict[str, float]]:
        staging: Staging | None = None
        try:
            staging = self._storage.stage(reservation.name, reservation.attempt)
            filled = fill(source, staging.path)
            given = as_json(metadata()) if callable(metadata) else metadata
            known = {ZERO_INIT: filled.zero_init, **given}
            manifest = manifest_of(reservation, source, filled.files, known)
            started = time.perf_counter()
            write_new(staging.path / MANIFEST_NAME, manifest.to_text().encode())
            self._storage.commit(staging)
            commit_s = time.perf_counter() - started
        except BaseException as error:
            self._abandon(reservation, staging, error)
            raise
        return manifest, _phases(filled, commit_s)

    def _append(self, manifest: Manifest, phases: Mapping[str, float]) -> None:
        self._unconfirmed = manifest
        try:
            self._ledger.publish(self._claim, manifest, phases=phases)
        except StaleEpoch:
            # the epoch's holder adopts the directory or puts it away: this publisher may not
            self._unconfirmed = None
            raise
        self._unconfirmed = None

    def _retry_append(self) -> None:
        """Append again, under the same key, what was not confirmed, so that no version is lost."""
        if self._unconfirmed is not None:
            self._append(self._unconfirmed, {})

    def _abandon(
        self, reservation: Reservation, staging: Staging | None, cause: BaseException
    ) -> None:
        """Reject the reservation; what cannot be removed now is swept at the next opening."""
        reason = cause.reason if isinstance(cause, CheckFailed) else str(cause)
        try:
            if staging is not None:
                self._storage.discard(staging)
        except StorageError as error:
            log.warning("staging of %s was not removed: %s", reservation.name, error)
        try:
            self._ledger.reject(self._claim, reservation.version, reason or type(cause).__name__)
        except LedgerError as error:
            if isinstance(error, StaleEpoch) and isinstance(cause, Exception):
                raise error from cause  # the cause of a staging that another publisher removed
            log.warning("%s was not marked as rejected: %s", reservation.name, error)

    def _published_before(self, version: int, source: Source) -> Published | None:
        """The published version of that number, if it is this run's and has the same bytes.

        Raises:
            Conflict: it belongs to another run, or has other bytes.
        """
        try:
            row = self._ledger.version(self._claim.line, version)
        except NotFound:
            return None
        if row.digest is None:
            return None  # reserving it will tell who has it
        files = [FileEntry(file, *hash_file(source.directory / file)) for file in source.sizes]
        digest = version_digest(files)
        if row.run != self._claim.run or row.digest != digest:
            raise Conflict(
                f"{policy_name(row.line, version)} was published in run {row.run!r} with digest "
                f"{row.digest[:16]}, {source.directory} has {digest[:16]}",
                hint="leave the number out to get the next one",
            )
        return self._result(Manifest.from_text(row.manifest or ""), {})

    def _result(self, manifest: Manifest, phases: Mapping[str, float]) -> Published:
        return Published(
            version=manifest.version,
            name=manifest.name,
            digest=manifest.digest,
            size_bytes=manifest.size_bytes,
            path=self._storage.locate(manifest.name),
            phases=dict(phases),
        )


def _phases(filled: Filled, commit_s: float) -> dict[str, float]:
    return {
        "save": filled.save_s,
        "digest": filled.digest_s,
        "check": filled.check_s,
        "commit": commit_s,
    }
