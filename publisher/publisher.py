"""Publishing: a saved adapter becomes a version of a run, once, durably, under fencing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from policyline.ledger.errors import Conflict, LedgerError, NotFound, StaleEpoch
from policyline.ledger.manifest import MANIFEST_NAME, Manifest
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.probe import ZERO_INIT
from policyline.ledger.settings import RunSettings
from policyline.ledger.store import Claim, Ledger, Reservation
from policyline.publisher.check.base_model import read_layer_sizes
from policyline.publisher.check.previous import PreviousLayout
from policyline.publisher.check.source import WEIGHTS_NAME, Source, inspect
from policyline.publisher.check.staging import fill
from policyline.publisher.errors import CheckFailed, PublisherClosed
from policyline.publisher.model import Published, as_json, manifest_of
from policyline.publisher.sweep import check_known, sweep
from policyline.storage import Staging, Storage, StorageError
from policyline.storage.files import write_new

log = logging.getLogger(__name__)

Metadata = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Publisher:
    """Publishes saved adapters as versions of one run.

    Opening a publisher opens the run, or continues it if it is open already. It claims the run's
    epoch: only the holder of the epoch may publish. It also finishes or puts away what an earlier
    publisher of the run left when it died. Use it as a context manager, from one thread at a time::

        with Publisher(ledger, storage, run="grpo-7") as publisher:
            published = publisher.publish("out/checkpoint-40", metadata={"step": 40})

    Args:
        ledger: records the versions; stays open when the publisher closes.
        storage: stores their files.
        run: name of the training run.
        line: prefix of the versions' names, `<line>-v<version>`.
        settings: rules of the run; used only when this opens the run for the first time.
        parent_run: the run that a new run continues from (a fork); None for none.
        parent_version: the version of `parent_run` that a new run continues from; None when not
            known.
        lineage: recorded with a new run as JSON, for example the step of the checkpoint.
        take_over: claim the epoch even if another publisher may be alive. That one is fenced: its
            next `publish` raises `StaleEpoch`.
        base_model: local directory of the base model; sizes and layer names are checked against
            its config.json. None and anything else, such as a Hub id, checks nothing.
        max_lora_rank: the servers' `--max-lora-rank`; a higher rank is refused. None when not
            known.

    Raises:
        StorageUnwritable: the storage cannot be written; nothing was changed.
        Refused: the run is closed, or another publisher holds it.
        UnknownVersion: the storage holds versions of this line that the ledger does not know.
        BaseModelInvalid: `base_model` is a directory without a readable config.json.
        LedgerUnavailable: the ledger does not answer.
        StorageUnavailable: the storage does not answer.
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
        """Run, line and epoch that this publisher holds."""
        return self._claim

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the epoch, so that the next publisher needs no take-over. Idempotent."""
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
        """Publish an adapter that PEFT saved. Returns when it is durable and recorded.

        The directory is only read. The same content published again is a new version, unless
        `version` names the one that has it: then that version is returned.

        Args:
            directory: holds `adapter_config.json` and `adapter_model.safetensors`. Files next to
                them are published too.
            metadata: recorded with the version, at most 1 MiB as JSON: step, learning rate, ...
                May be a function that returns it. It is called when the files are copied, so it
                may take as long as that.
            version: the version's number; None takes the line's next.
            phases: seconds that the caller spent before (`train_step`, `gather`, `save`). They are
                recorded with the phases of publishing; a phase of both is their sum.

        Returns:
            The version, with its number, name, digest and size.

        Raises:
            CheckFailed: vLLM could not serve the adapter, or it differs in tensors or shapes from
                the run's previous version. Nothing became visible. A fault that shows without
                reading the tensors' numbers costs no version number.
            MetadataInvalid: the metadata is not JSON, or too large.
            Conflict: `version` is taken by other bytes.
            StaleEpoch: another publisher holds the run now.
            PublisherClosed: `close` was called.
            StorageError: files could not be read or written.
            LedgerUnavailable: the ledger does not answer. If the version was in the storage
                already, the next `publish`, or the next opening of the run, records it.
        """
        if self._closed:
            raise PublisherClosed(
                f"this publisher of run {self._claim.run!r} is closed", hint="open another"
            )
        if self._unconfirmed is not None:  # under the same key, so that no version is lost
            self._append(self._unconfirmed, {})
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
        return manifest, {**filled.phases, "commit": commit_s}

    def _append(self, manifest: Manifest, phases: Mapping[str, float]) -> None:
        self._unconfirmed = manifest
        try:
            self._ledger.publish(self._claim, manifest, phases=phases)
        except StaleEpoch:
            # the epoch's holder adopts the directory or puts it away: this publisher may not
            self._unconfirmed = None
            raise
        self._unconfirmed = None

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
            return None  # reserving it will name the holder
        digest = source.digest()
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
