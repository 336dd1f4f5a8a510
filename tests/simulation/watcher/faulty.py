"""Ledger and storage as one watcher sees them: the real ones, with scripted faults before them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from policyline.ledger import EngineFacts, Ledger, Membership
from policyline.ledger.append.unit_of_work import UnitOfWork
from policyline.ledger.errors import LedgerUnavailable, Refused, StaleGeneration
from policyline.ledger.events import Event
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.manifest import FileEntry
from policyline.storage import DirectoryStorage, StorageUnavailable
from tests.simulation.watcher.bus import Bus
from tests.simulation.watcher.clock import Turns
from tests.simulation.watcher.lifeline import Lifeline

COPIER = "fetch-"
"""How the names of the watcher's threads begin that copy from storage."""
LedgerFault = Literal["", "away", "read_only", "deaf"]
"""`away`: nothing works; `read_only`: no transaction is begun; `deaf`: it commits, and then the
connection breaks, for `replies_lost` times."""


class Witness(Protocol):
    """Hears what a watcher says, at the moment it is committed."""

    def acked(self, version: int, digest: str, incarnation: str) -> None: ...
    def rejected(self, version: int, reason: str) -> None: ...
    def spoke(self) -> None: ...
    def beaten(self, generation: int) -> None: ...
    def declared_lost(self, replica: str, generation: int) -> None: ...


@dataclass
class Weather:
    """What is wrong now."""

    turns: Turns
    """A copy goes on in its thread's turn only."""
    ledger: LedgerFault = ""
    replies_lost: int = 0
    storage_fails: int = 0
    """So many copies fail."""
    storage_stalls: int = 0
    """So many copies stand still until the weather is fine."""
    stalled: dict[threading.Thread, threading.Event] = field(default_factory=dict)
    """Copies that stand still, and what lets each go on."""

    def let_the_stalled_go_on(self) -> None:
        for go_on in self.stalled.values():
            go_on.set()
        self.stalled.clear()


class SimulatedLedger(Ledger):
    """The real ledger behind a connection that can break.

    Args:
        url: of the ledger.
        bus: carries its signals.
        now: gives the time to record.
        weather: of the world.
        lifeline: of the one who speaks.
        witness: hears what is recorded; None for nobody.
    """

    def __init__(
        self,
        url: str,
        bus: Bus,
        now: Callable[[], datetime],
        *,
        weather: Weather,
        lifeline: Lifeline,
        witness: Witness | None = None,
    ) -> None:
        self._weather = weather
        self._lifeline = lifeline
        self._witness = witness
        self.last_view: LineSnapshot | None = None
        """The last answer to `view`; None after a failed one."""
        super().__init__(url, actor="sim@there:1", clock=now)
        self._signal = bus

    @contextmanager
    def _translating(self) -> Iterator[None]:
        self._lifeline.effect("before the ledger")
        self._refuse_in({"away"})
        with super()._translating():
            yield
        self._lifeline.effect("after the ledger")

    @contextmanager
    def _appending(self) -> Iterator[UnitOfWork]:
        self._refuse_in({"read_only"})
        with super()._appending() as journal:
            yield journal
        if self._weather.ledger == "deaf":
            self._weather.replies_lost -= 1
            if self._weather.replies_lost <= 0:
                self._weather.ledger = ""
            raise LedgerUnavailable("a test: the reply is lost")

    def _refuse_in(self, faults: Collection[str]) -> None:
        if self._weather.ledger in faults:
            raise LedgerUnavailable(f"a test: {self._weather.ledger}")

    def view(
        self, line: str, also: Collection[int] = (), *, replica: str | None = None
    ) -> LineSnapshot:
        self.last_view = None
        self.last_view = super().view(line, also, replica=replica)
        return self.last_view

    def ack(self, member: Membership, version: int, **facts: Any) -> Event:
        try:
            event: Event = super().ack(member, version, **facts)
        except (Refused, StaleGeneration):
            raise
        except LedgerUnavailable as unavailable:
            if "reply is lost" in str(unavailable) and self._witness is not None:
                self._witness.acked(version, facts["digest"], facts["incarnation"])
            raise
        if self._witness is not None:
            self._witness.acked(version, facts["digest"], facts["incarnation"])
        return event

    def join(self, line: str, replica: str, facts: EngineFacts, *, url: str = "") -> Membership:
        member: Membership = super().join(line, replica, facts, url=url)
        if self._witness is not None:
            self._witness.spoke()
        return member

    def beat(self, member: Membership, counter: int) -> None:
        super().beat(member, counter)
        if self._witness is not None:
            self._witness.beaten(member.generation)

    def declare_lost(
        self, line: str, replica: str, *, generation: int, counter: int, reason: str
    ) -> bool:
        lost: bool = super().declare_lost(
            line, replica, generation=generation, counter=counter, reason=reason
        )
        if lost and self._witness is not None:
            self._witness.declared_lost(replica, generation)
        return lost

    def change_incarnation(
        self, member: Membership, facts: EngineFacts, *, reason: str = ""
    ) -> None:
        super().change_incarnation(member, facts, reason=reason)
        if self._witness is not None:
            self._witness.spoke()

    def load_failed(self, member: Membership, version: int, **facts: Any) -> None:
        super().load_failed(member, version, **facts)
        if facts["permanent"] and self._witness is not None:
            self._witness.rejected(version, facts["reason"])


class SimulatedStorage(DirectoryStorage):
    """A directory on a mount that can fail or stand still."""

    def __init__(self, root: Path, weather: Weather, lifeline: Lifeline) -> None:
        super().__init__(root)
        self._weather = weather
        self._lifeline = lifeline

    def fetch(self, name: str, entries: Sequence[FileEntry], into: Path) -> None:
        weather = self._weather
        weather.turns.wait()
        self._lifeline.effect("before the copy")
        if weather.storage_fails > 0:
            weather.storage_fails -= 1
            raise StorageUnavailable("a test: the mount fails")
        if weather.storage_stalls > 0:
            weather.storage_stalls -= 1
            go_on = threading.Event()
            weather.stalled[threading.current_thread()] = go_on
            go_on.wait()
            weather.turns.wait()
            self._lifeline.effect("after the stall")
        super().fetch(name, entries, into)
        self._lifeline.effect("after the copy")


def clock_from(seconds: Callable[[], float]) -> Callable[[], datetime]:
    """A ledger's clock from the injected one."""
    return lambda: datetime.fromtimestamp(1_800_000_000 + seconds(), tz=UTC)
