"""Errors of the publisher. Errors of the ledger and the storage pass through as they are.

    PublisherError
    ├── CheckFailed        the directory does not hold a version that can be served
    ├── MetadataInvalid    metadata that JSON cannot hold
    ├── BaseModelInvalid   a base model was named whose config.json cannot be read
    ├── UnknownVersion     the storage holds a version of this line that the ledger does not know
    ├── PublisherClosed    used after `close`
    └── TrainingStopped    why a trainer must not go on
        ├── NothingReady       what was published is served nowhere
        ├── PublishingHeld     ledger or storage are away for too long
        ├── OtherRankFailed    rank 0 has failed; its own error says why
        └── NotSupported       a trainer, a TRL release or a setting that this cannot work with

Each carries `hint`, the remedy as one imperative sentence; the text of the error ends with it.
"""

from __future__ import annotations

from pathlib import Path

from policyline.errors import ExitCode, PolicylineError


class PublisherError(PolicylineError):
    """Root of the publisher's errors."""


class CheckFailed(PublisherError):
    """What was to be published cannot be; nothing became visible.

    Args:
        path: the directory, or the file in it that is at fault.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path
        self.reason = reason


class MetadataInvalid(PublisherError):
    """The caller's metadata is not JSON (NaN included)."""


class BaseModelInvalid(PublisherError):
    """The named base model has no readable config.json."""

    exit_code = ExitCode.USAGE


class UnknownVersion(PublisherError):
    """A complete version of this line lies in the storage, and this ledger does not know it.

    Its name must not be given to other bytes (I1).

    Args:
        name: the version's name.
        ledger_id: the ledger that it was published in.
    """

    def __init__(self, message: str, *, name: str, ledger_id: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.name = name
        self.ledger_id = ledger_id


class PublisherClosed(PublisherError):
    """The publisher gave its epoch back already."""


class TrainingStopped(PublisherError):
    """Why a trainer must not go on."""


class NothingReady(TrainingStopped):
    """What was published is served by no replica, for longer than the bound."""


class PublishingHeld(TrainingStopped):
    """Nothing can be published, because ledger or storage are away, for longer than the bound."""


class OtherRankFailed(TrainingStopped):
    """Rank 0 has failed: this rank stops with it instead of waiting for it."""


class NotSupported(TrainingStopped):
    """A trainer, a TRL release or a setting that this integration cannot work with."""
