"""Errors of the publisher. Errors of the ledger and the storage pass through unchanged.

    PublisherError
    ├── CheckFailed        the directory is not an adapter that can be served
    ├── MetadataInvalid    metadata that is not JSON, or too large
    ├── BaseModelInvalid   a base model was named whose config.json cannot be read
    ├── UnknownVersion     the storage holds a version of this line that the ledger does not know
    ├── PublisherClosed    used after `close`
    └── TrainingStopped    training cannot go on
        ├── NothingReady       no replica serves what was published
        ├── PublishingBlocked  ledger or storage are unavailable for too long
        ├── OtherRankFailed    rank 0 has failed, with an error of its own
        └── NotSupported       a trainer, a TRL release or a setting that this cannot work with

Each carries `hint`, the remedy as one imperative sentence; the text of the error ends with it.
"""

from __future__ import annotations

from pathlib import Path

from policyline.errors import ExitCode, PolicylineError


class PublisherError(PolicylineError):
    """Root of the publisher's errors."""


class CheckFailed(PublisherError):
    """The adapter cannot be published; nothing became visible.

    Args:
        path: the directory, or the file in it that has the fault.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path
        self.reason = reason


class MetadataInvalid(PublisherError):
    """The caller's metadata is not JSON (NaN is not), or larger than 1 MiB."""


class BaseModelInvalid(PublisherError):
    """The named base model has no readable config.json."""

    exit_code = ExitCode.USAGE


class UnknownVersion(PublisherError):
    """The storage holds a complete version of this line that this ledger does not know.

    Its name must not be given to other bytes (I1).

    Args:
        name: the version's name.
        ledger_id: identifies the ledger that it was published in.
    """

    def __init__(self, message: str, *, name: str, ledger_id: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.name = name
        self.ledger_id = ledger_id


class PublisherClosed(PublisherError):
    """`publish` was called after `close`."""


class TrainingStopped(PublisherError):
    """Training cannot go on."""


class NothingReady(TrainingStopped):
    """No replica has served what was published, for longer than `ready_timeout_s`."""


class PublishingBlocked(TrainingStopped):
    """Ledger or storage have been unavailable for longer than `ready_timeout_s`."""


class OtherRankFailed(TrainingStopped):
    """Rank 0 has failed, so this rank stops too instead of waiting for it."""


class NotSupported(TrainingStopped):
    """A trainer, a TRL release or a setting that this integration cannot work with."""
