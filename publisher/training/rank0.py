"""A trainer with rollouts on a fleet: publishes, and knows what the fleet serves. Rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
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
from policyline.publisher.training.follower import Follower
from policyline.publisher.training.progress import Clocks
from policyline.publisher.training.publish_thread import Saved
from policyline.publisher.training.session import Session


@dataclass(frozen=True, slots=True)
class Parked:
    """An adapter that is saved and waits for the log of its step."""

    directory: Path
    facts: Mapping[str, Any]
    phases: Mapping[str, float]
    reference: Future[list[float]] | None = None


class Fleet:
    """What rank 0 holds while it trains: the publishing session, and what the ledger says.

    Args:
        to, max_staleness, base_model, staging, resumed: as `Session`.
        published: told of each version of this trainer, in another thread.
        name: told what rollouts should ask for, and whether it is served; as `Clocks`.
    """

    def __init__(
        self,
        to: PublishTo,
        *,
        max_staleness: int,
        base_model: str,
        staging: Path,
        resumed: Mapping[str, Any],
        published: Callable[[int], None],
        name: Callable[[int, bool], None],
    ) -> None:
        self._to = to
        self._tell_published = published
        self.session = Session(
            to,
            max_staleness=max_staleness,
            base_model=base_model,
            staging=staging,
            resumed=resumed,
            published=self._published,
        )
        self.clocks = Clocks(
            to.line,
            max_staleness=max_staleness,
            timeout_s=to.ready_timeout_s,
            name=name,
            failure=lambda: self.session.background.failure,
            held=lambda: self.session.background.held,
            foreign=self._foreign,
        )
        self.is_first = True
        self._follower = Follower(
            self.session.ledger, to.line, also=self.clocks.newest, seen=self.clocks.see
        )

    def require_one_way(self, base_url: str) -> None:
        """Refuse to send everything to one of several servers: not every version is there."""
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
        """Stop here if publishing has failed; wait while rollouts are too far behind."""
        self.session.raise_failure()
        if not self.is_first:
            self.clocks.wait_room()

    def hand_over(self, parked: Parked) -> None:
        """Publish it behind the trainer."""
        sync = self.session.hand_over(
            parked.directory, parked.facts, parked.phases, parked.reference
        )
        self.clocks.hand_over(sync)

    def wait_first(self) -> None:
        """Wait until rollouts have a version of this trainer to ask for."""
        self.clocks.wait_served(0)
        self.is_first = False

    def close(self) -> None:
        """Publish nothing more, give the epoch back."""
        self._follower.close()
        self.session.close()

    def _foreign(self, version: int) -> dict[str, str]:
        return foreign_adapters(self.session.ledger, self._to.line, version)

    def _published(self, saved: Saved, published: Published) -> None:
        self._tell_published(published.version)
        self.clocks.publish(saved.sync, published.version)
        self._follower.wake()


def foreign_adapters(ledger: Ledger, line: str, version: int) -> dict[str, str]:
    """Replica -> what its vLLM has under the version's name that another ledger or hand loaded.

    As the sidecars reported it; empty while the ledger does not answer.
    """
    name = policy_name(line, version)
    found: dict[str, str] = {}
    try:
        present = {row.replica: row.generation for row in ledger.replicas(line)}
        for event in ledger.events(line=line, kinds=[FOREIGN_ADAPTER_SEEN, INCARNATION_CHANGED]):
            replica = event.replica or ""
            if event.kind == INCARNATION_CHANGED:
                found.pop(replica, None)  # another life of vLLM has nothing of the former's
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
