"""Rank 0 of a trainer with rollouts: publishes, and follows what the replicas serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from policyline.ledger.errors import LedgerError
from policyline.ledger.events import FOREIGN_ADAPTER_SEEN, INCARNATION_CHANGED
from policyline.ledger.names import policy_name
from policyline.ledger.rows import ReplicaRow
from policyline.ledger.store import Ledger
from policyline.publisher.errors import NotSupported
from policyline.publisher.model import Published
from policyline.publisher.settings import PublishTo
from policyline.publisher.training.progress import SyncProgress
from policyline.publisher.training.publish_thread import Saved
from policyline.publisher.training.session import Session
from policyline.publisher.training.snapshot_thread import SnapshotThread


class Rank0Session:
    """The publishing session, and the progress of its syncs in the ledger.

    Args:
        to, max_staleness, base_model, staging, resumed: as `Session`.
        on_published: called with each published version, in the publishing thread.
        on_current: called with the version that rollouts should ask for, and whether a replica
            serves it; as in `SyncProgress`.
    """

    def __init__(
        self,
        to: PublishTo,
        *,
        max_staleness: int,
        base_model: str,
        staging: Path,
        resumed: Mapping[str, Any],
        on_published: Callable[[int], None],
        on_current: Callable[[int, bool], None],
    ) -> None:
        self._to = to
        self._on_published = on_published
        self.session = Session(
            to,
            max_staleness=max_staleness,
            base_model=base_model,
            staging=staging,
            resumed=resumed,
            on_published=self._published,
        )
        self.progress = SyncProgress(
            to.line,
            max_staleness=max_staleness,
            timeout_s=to.ready_timeout_s,
            on_current=on_current,
            failure=lambda: self.session.thread.failure,
            blocked=lambda: self.session.thread.blocked,
            foreign=self._foreign,
        )
        self.is_first = True
        self._snapshots = SnapshotThread(
            self.session.ledger,
            to.line,
            extra_versions=self.progress.published_versions,
            on_snapshot=self.progress.update,
        )

    def check_routing(self, base_url: str) -> None:
        """Refuse to send every rollout to one of several servers: it may lack the version.

        Raises:
            NotSupported: `servers` names a replica that has not joined, or `base_url` is one of
                several servers.
        """
        rows = [r for r in self.session.ledger.replicas(self._to.line) if r.state == "joined"]
        unknown = sorted(set(self._to.servers) - {r.replica for r in rows})
        if unknown:
            raise NotSupported(
                f"servers names {', '.join(unknown)}, joined are {_names(rows)}",
                hint="start their sidecars first, with these names as --replica",
            )
        direct = any(r.url.rstrip("/") == base_url.rstrip("/") for r in rows)
        if direct and len(rows) > 1 and not self._to.servers:
            raise NotSupported(
                f"vllm_server_base_url {base_url} is one of the line's {len(rows)} servers "
                f"({_names(rows)}), and a version may be served by another",
                hint="give the router's URL, or PublishTo(servers={replica: URL, ...})",
            )

    def before_sync(self) -> None:
        """Raise what ended publishing; wait while rollouts are too far behind."""
        self.session.raise_failure()
        if not self.is_first:
            self.progress.wait_room()

    def submit(self) -> None:
        """Publish what was saved and waits for its step's log, if anything does."""
        sync = self.session.submit()
        if sync is not None:
            self.progress.note_submitted(sync)

    def wait_first(self) -> None:
        """Wait until rollouts have a version of this trainer to ask for."""
        self.progress.wait_served(0)
        self.is_first = False

    def close(self) -> None:
        """Publish nothing more, release the epoch."""
        self._snapshots.close()
        self.session.close()

    def _foreign(self, version: int) -> dict[str, str]:
        return foreign_adapters(self.session.ledger, self._to.line, version)

    def _published(self, saved: Saved, published: Published) -> None:
        self._on_published(published.version)
        self.progress.note_published(saved.sync, published.version)
        self._snapshots.wake()


def foreign_adapters(ledger: Ledger, line: str, version: int) -> dict[str, str]:
    """Replica -> what its vLLM serves under the version's name that is not this version.

    As the sidecars reported it; empty while the ledger does not answer.
    """
    name = policy_name(line, version)
    found: dict[str, str] = {}
    try:
        present = {row.replica: row.generation for row in ledger.replicas(line)}
        for event in ledger.events(line=line, kinds=[FOREIGN_ADAPTER_SEEN, INCARNATION_CHANGED]):
            replica = event.replica or ""
            if event.kind == INCARNATION_CHANGED:
                found.pop(replica, None)  # a restarted vLLM has lost what it had loaded
            elif event.data["name"] == name and event.generation == present.get(replica):
                found[replica] = (
                    f"its vLLM serves {event.data['path']!r} under that name "
                    f"({event.data['why']}); restart vLLM, or its sidecar with --take-over"
                )
    except LedgerError:
        return {}
    return found


def _names(rows: list[ReplicaRow]) -> str:
    return ", ".join(row.replica for row in rows) or "none"
