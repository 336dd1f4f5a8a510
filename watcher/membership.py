"""A replica's membership in the ledger, and what it knows of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from policyline.ledger.actor import host_and_pid, is_gone
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.probe import PROBE_TOKENS
from policyline.ledger.rows import ReplicaRow
from policyline.ledger.store import EngineFacts, Ledger, Membership
from policyline.watcher.errors import (
    EngineInUse,
    ReplicaInUse,
    ReplicaTakenOver,
    RuntimeLoadingOff,
    SlotsShort,
    WatcherError,
)
from policyline.watcher.vllm.answers import EngineInfo
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError, NonFinite, RequestRefused, RouteMissing

log = logging.getLogger(__name__)


class ReplicaMembership:
    """Represents one replica until it leaves, is declared lost or superseded by a newer watcher.

    Args:
        ledger: to join.
        engine: of the replica.
        line: of the ledger.
        replica: the engine's name in it.
        url: at which routers reach the engine; None: at the engine client's own.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: EngineClient,
        *,
        line: str,
        replica: str,
        url: str | None = None,
    ) -> None:
        self._url = url or engine.base_url
        self.line = line
        self.replica = replica
        self.info: EngineInfo | None = None
        self.base_probe: tuple[float, ...] | None = None
        """The base model's values for the probe, taken on the present build while it held no
        adapter: in a batch with adapters vLLM's CPU build answers wrongly for the base model."""
        self._ledger = ledger
        self._engine = engine
        self._member: Membership | None = None
        self._watched: tuple[str, int | None] | None = None
        self._slots_in_metrics: int | None = None

    @property
    def member(self) -> Membership:
        """The membership; only after `join`."""
        if self._member is None:
            raise RuntimeError("the watcher has not joined")
        return self._member

    @property
    def has_joined(self) -> bool:
        """Whether it ever joined."""
        return self._member is not None

    @property
    def build(self) -> str:
        """The engine's build: probes are comparable within one build."""
        return "" if self.info is None else self.info.build

    @property
    def max_loras(self) -> int | None:
        """The engine's adapter slots; None when it does not tell."""
        slots = None if self.info is None else self.info.max_loras
        return self._slots_in_metrics if slots is None else slots

    async def meet_engine(self) -> None:
        """Read how the engine was started.

        Raises:
            EngineError: it does not answer.
            RuntimeLoadingOff: it cannot load adapters at run time.
        """
        former, self.info = self.info, await self._engine.info()
        if former is not None and former.build != self.info.build:
            self.base_probe = None
        if self.info.runtime_lora is False:
            raise RuntimeLoadingOff(self._engine.base_url)

    async def prove_alive(self) -> None:
        """Have the base model answer a scored request, unless the engine is paused.

        Raises:
            EngineError: it does not answer.
        """
        with contextlib.suppress(RouteMissing):
            if await self._engine.is_paused():
                return
        before = await self._engine.snapshot()
        with contextlib.suppress(NonFinite, RequestRefused):
            values = await self._engine.score(before.models.base.name, PROBE_TOKENS)
            if not before.models.adapters and not before.busy:
                self.base_probe = values
            # the answer was an output, and from the first one on the metrics report the slots
            self._slots_in_metrics = (await self._engine.snapshot()).max_loras

    async def check_slots(self) -> None:
        """Require a slot for each version that the open run may want served at once.

        Raises:
            SlotsShort: the engine has fewer.
        """
        view = await asyncio.to_thread(self._ledger.view, self.line)
        short = self._slots_short(view)
        if short is not None:
            raise short

    def watch_slots(self, view: LineSnapshot) -> None:
        """Say once for each run and engine if its slots do not suffice, or are not known."""
        if view.run is None or self._watched == (view.run.run, self.max_loras):
            return
        self._watched = (view.run.run, self.max_loras)
        short = self._slots_short(view)
        if short is not None:
            log.error("%s", short, extra={"event": "slots_short"})
        elif self.max_loras is None:
            log.warning(
                "vLLM does not report its --max-loras; run %r needs %d or more",
                view.run.run,
                view.run.max_staleness + 2,
                extra={"event": "slots_unknown"},
            )

    def _slots_short(self, view: LineSnapshot) -> SlotsShort | None:
        run, slots = view.run, self.max_loras
        if run is None or slots is None or slots >= run.max_staleness + 2:
            return None
        return SlotsShort(max_loras=slots, max_staleness=run.max_staleness, run=run.run)

    async def holders(self, *, replace: bool) -> dict[str, WatcherError]:
        """Replica -> the refusal, for each sidecar that may be serving this replica or this engine.

        Args:
            replace: whoever serves this replica is to be replaced.
        """
        found: dict[str, WatcherError] = {}
        rows = await asyncio.to_thread(self._ledger.replicas, self.line)
        joined = [row for row in rows if row.state == "joined"]
        own = [] if replace else [row for row in joined if row.replica == self.replica]
        for row in (*own, *await self._of_this_engine(joined)):
            actor = await self._who_joined(row)
            if is_gone(actor):
                continue
            if row.replica == self.replica:
                found[row.replica] = ReplicaInUse(
                    self.replica, holder=actor, since=row.joined_at, url=row.url
                )
            elif (
                not _is_loopback(row.url)
                or host_and_pid(actor)[0] == host_and_pid(self._ledger.actor)[0]
            ):
                found[row.replica] = EngineInUse(row.url, replica=row.replica, holder=actor)
        return found

    async def _of_this_engine(self, joined: Sequence[ReplicaRow]) -> list[ReplicaRow]:
        """Other replicas of one address and one start: two of a fleet share either, seldom both."""
        alike = [row for row in joined if row.replica != self.replica and row.url == self._url]
        if not alike:
            return []
        try:
            incarnation = await self._engine.incarnation()
        except EngineError:
            return []  # it is gone again; its next process has another start time
        return [row for row in alike if row.incarnation == incarnation]

    async def _who_joined(self, row: ReplicaRow) -> str:
        joined = await asyncio.to_thread(
            lambda: next(iter(self._ledger.events(after=row.joined_seq - 1, limit=1)))
        )
        return joined.actor

    async def heartbeats(self) -> dict[str, tuple[int, int]]:
        """Replica -> (generation, counter) of its heartbeat."""
        return await asyncio.to_thread(self._ledger.heartbeats, self.line)

    async def join(self, incarnation: str | None) -> None:
        """Join with a new generation; a former watcher of this replica is fenced.

        Args:
            incarnation: of the engine, whose acks count from here on; None when it may lack what
                it acked, so that no ack counts before that is settled.
        """
        self._member = await asyncio.to_thread(
            self._ledger.join,
            self.line,
            self.replica,
            self._facts(incarnation),
            url=self._url,
        )
        log.info(
            "joined as %s, generation %d",
            self.replica,
            self._member.generation,
            extra={
                "event": "joined",
                "replica": self.replica,
                "generation": self._member.generation,
                "incarnation": incarnation,
            },
        )

    async def announce(self, incarnation: str | None, why: str) -> None:
        """Tell the ledger which incarnation runs now, None for none that answers, and why."""
        facts = self._facts(incarnation)
        await asyncio.to_thread(self._ledger.change_incarnation, self.member, facts, reason=why)

    async def beat(self, counter: int) -> None:
        """Move the heartbeat."""
        await asyncio.to_thread(self._ledger.beat, self.member, counter)

    async def leave(self, reason: str) -> None:
        """Leave the fleet, so that nobody waits for this replica."""
        await asyncio.to_thread(self._ledger.leave, self.member, reason)

    async def must_rejoin(self) -> bool:
        """After a refusal: whether this watcher was declared lost and may join again.

        Raises:
            ReplicaTakenOver: a newer watcher has joined.
        """
        rows = await asyncio.to_thread(self._ledger.replicas, self.line)
        row = next((row for row in rows if row.replica == self.replica), None)
        if row is None:
            return True
        if row.generation > self.member.generation:
            raise ReplicaTakenOver(
                self.replica, generation=self.member.generation, newer=row.generation
            )
        return row.state != "joined"

    def _facts(self, incarnation: str | None) -> EngineFacts:
        return EngineFacts(incarnation, self.build, self.max_loras)


def _is_loopback(url: str) -> bool:
    """Whether it means another machine on every machine."""
    host = urlsplit(url).hostname or ""
    return host in {"localhost", "::1"} or host.startswith("127.")
