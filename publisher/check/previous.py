"""The previous version of a run, which the next one is compared with."""

from __future__ import annotations

import logging

from policyline.ledger.names import policy_name
from policyline.ledger.store import Ledger
from policyline.publisher.check.lora import check_previous, summary
from policyline.publisher.check.safetensors_header import HeaderInvalid, Layout, read_header
from policyline.publisher.check.source import WEIGHTS_NAME
from policyline.storage import FileMissing, Storage, UnsafePath

log = logging.getLogger(__name__)


class PreviousLayout:
    """The tensor names and shapes of a run's newest version that was not withdrawn."""

    def __init__(self, ledger: Ledger, storage: Storage, line: str, run: str) -> None:
        self._ledger = ledger
        self._storage = storage
        self._line = line
        self._run = run
        self._known: tuple[int, Layout] | None = None

    def remember(self, version: int, layout: Layout) -> None:
        """Remember the layout of a version that was just published."""
        self._known = (version, layout)

    def difference(self, layout: Layout) -> str:
        """How `layout` differs, in one line; empty when it does not or is the run's first.

        Raises:
            StorageUnavailable: the previous version cannot be read now.
        """
        if self._known is not None and self._known[1] == layout:
            return ""
        self._known = self._load()  # what was remembered may have been withdrawn since
        if self._known is None:
            return ""
        version, before = self._known
        return summary(check_previous(layout, before, policy_name(self._line, version)))

    def _load(self) -> tuple[int, Layout] | None:
        rows = [
            row
            for row in self._ledger.versions(run=self._run)
            if row.state in {"published", "skipped"} and not row.collected
        ]
        if not rows:
            return None
        newest = max(rows, key=lambda row: row.published_seq or 0)
        name = policy_name(self._line, newest.version)
        try:
            _, header = read_header(lambda n: self._storage.read_head(name, WEIGHTS_NAME, n))
        except (FileMissing, UnsafePath, HeaderInvalid) as error:
            log.warning(
                "%s was not compared with the next version: %s",
                name,
                error,
                extra={"event": "previous_unreadable"},
            )
            return None
        return newest.version, header.layout
