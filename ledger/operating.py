"""The operator's verbs, and time passing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger import events as kinds
from ledger.consequences import follow
from ledger.errors import (
    NotFound,
    Refused,
)
from ledger.names import policy_name
from ledger.readiness import Elapsed
from ledger.rows import LineRow, VersionRow
from ledger.writing import Writing


class Operating(Writing):
    """Verbs of whoever steers or observes a line."""

    def settle(self, line: str, candidate: int, elapsed: Elapsed) -> bool:
        """Let time pass for the candidate, as seen on the observer's own clock.

        Returns:
            Whether something followed; False when the candidate is another one by now.
        """
        with self._writing() as journal:
            row = journal.get(LineRow, (line,))
            if row is None or row.candidate != candidate:
                return False
            return bool(follow(journal, line, self._actor, elapsed))

    def pin(self, line: str, version: int, *, serve: bool) -> None:
        """Keep a version's files, or with `serve` keep it served too, whatever the window says.

        Raises:
            NotFound: not published.
        """
        self._mark(line, version, kinds.VERSION_PINNED, {"serve": serve})

    def unpin(self, line: str, version: int) -> None:
        """Undo `pin`.

        Raises:
            NotFound: not published.
        """
        self._mark(line, version, kinds.VERSION_UNPINNED, {})

    def _mark(self, line: str, version: int, kind: str, payload: Mapping[str, Any]) -> None:
        with self._writing() as journal:
            row = journal.get(VersionRow, (line, version))
            if row is None or row.digest is None:
                raise NotFound(f"{policy_name(line, version)} is not published in this ledger")
            self._append(journal, kind, line=line, run=row.run, version=version, payload=payload)

    def withdraw(self, line: str, version: int, reason: str) -> None:
        """Take a published version out of service for ever. Idempotent.

        Raises:
            NotFound: not published.
            Refused: it is current; roll back instead.
        """
        with self._writing() as journal:
            row = journal.get(VersionRow, (line, version))
            if row is None or row.state == "reserved":
                raise NotFound(f"{policy_name(line, version)} is not published in this ledger")
            present = journal.get(LineRow, (line,))
            if present is not None and present.current == version:
                raise Refused(
                    f"{policy_name(line, version)} is current",
                    hint="run: policyline ledger rollback --to an earlier version",
                )
            if row.state in {"published", "skipped"}:
                self._append(
                    journal,
                    kinds.VERSION_WITHDRAWN,
                    line=line,
                    run=row.run,
                    version=version,
                    payload={"reason": reason[:500]},
                )
