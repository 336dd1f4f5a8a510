"""Observes: ledger, engine and local copies, each once, into pure values."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.line_snapshot import LineSnapshot, Role
from policyline.ledger.names import parse_policy_name, policy_name
from policyline.ledger.rows import VersionRow
from policyline.ledger.store import Ledger
from policyline.watcher.cache import Cache
from policyline.watcher.core.model import Desired, Known, Observed, Unknown, Version
from policyline.watcher.errors import LedgerReplaced
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    RouteMissing,
)
from policyline.watcher.vllm.worker_slots import WorkerSlots


@dataclass(frozen=True, slots=True)
class _PauseSeen:
    """Whether the engine is paused, or why that is not known."""

    paused: bool | None = None
    cause: str = ""
    unanswered: str = ""
    no_route: bool = False


_NO_ROUTE: Final = _PauseSeen(
    cause="vLLM has no development routes; start it with VLLM_SERVER_DEV_MODE=1", no_route=True
)


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of ledger, engine and disk."""

    desired: Desired | Unknown
    observed: Observed
    view: LineSnapshot | None
    """The ledger's view; None when it could not be read."""


class Observer:
    """Observes; remembers which versions to ask the ledger about, and those at rest.

    A version is at rest when it is out of the window, this replica reported it evicted, and the
    engine does not list it: only its copy waits for the grace. Nothing more is reported about it.
    There may be hundreds, so the ledger is asked about them in full observations only. One that
    becomes desired again is among the desired.

    Args:
        ledger: what is desired.
        engine: what is served.
        cache: what is on the local disk.
        worker_slots: which of our versions are in worker memory.
        line: to observe.
        replica: whose residency counts.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: EngineClient,
        cache: Cache,
        worker_slots: WorkerSlots,
        *,
        line: str,
        replica: str,
    ) -> None:
        self._worker_slots = worker_slots
        self._ledger = ledger
        self._engine = engine
        self._cache = cache
        self._line = line
        self._replica = replica
        self._ask_about: frozenset[int] = frozenset()
        self._at_rest: dict[int, Version] = {}
        self._stale_caches: frozenset[str] = frozenset()
        self._seen: tuple[LineSnapshot, Desired] | None = None
        self._no_pause_route: str | None = None
        """The incarnation that is known to have no development routes."""

    async def observe(self) -> Observation:
        """Read ledger and engine.

        Raises:
            LedgerReplaced: another ledger answers.
        """
        return await self.complete(await self.read_ledger(fully=True))

    async def complete(self, view: LineSnapshot | Unknown) -> Observation:
        """Read the engine as well; a failed read is `Unknown`, never empty (I10).

        Raises:
            LedgerReplaced: another ledger answers.
        """
        wanted = self.desired(view).wanted if isinstance(view, LineSnapshot) else ()
        observed, numbers = await self._observe_engine({v.copy_name for v in wanted})
        if isinstance(view, LineSnapshot) and not numbers <= self._known_to(view, observed):
            view = await self._read_ledger(self._ask_about | numbers)
        if isinstance(view, Unknown):
            return Observation(view, observed, None)
        desired = self.desired(view)
        # an ack of a version that is neither here nor desired must be taken back
        self._ask_about = numbers | {
            v.version for v in desired.out_of_window if v.reported == "acked"
        }
        self._at_rest = {
            version.version: version
            for version in desired.out_of_window
            if version.reported == "evicted"
            and isinstance(observed, Known)
            and version.name not in observed.adapters
        }
        return Observation(desired, observed, view)

    async def read_ledger(self, *, fully: bool) -> LineSnapshot | Unknown:
        """Read the line, and the versions that were last seen here; `fully`: those at rest too.

        Raises:
            LedgerReplaced: another ledger answers.
        """
        return await self._read_ledger(
            self._ask_about if fully else self._ask_about - self._at_rest.keys()
        )

    def desired(self, view: LineSnapshot) -> Desired:
        """The view as it concerns this replica; asked several times for each view."""
        if self._seen is None or self._seen[0] is not view:
            desired = desired_from(view, self._replica)
            shown = {v.version for v in (*desired.wanted, *desired.out_of_window)}
            rest = [v for n, v in self._at_rest.items() if n in self._ask_about and n not in shown]
            if rest:
                out_of_window = sorted((*desired.out_of_window, *rest), key=lambda v: v.version)
                desired = replace(desired, out_of_window=tuple(out_of_window))
            self._seen = (view, desired)
        return self._seen[1]

    def find_stale_caches(self) -> None:
        """Find the caches of former ledgers next to ours."""
        self._stale_caches = self._cache.stale_caches()

    def _present_stale_caches(self) -> frozenset[str]:
        return frozenset(path for path in self._stale_caches if Path(path).is_dir())

    def ask_about(self, numbers: frozenset[int]) -> None:
        """Ask the ledger about these versions too, in the next observation."""
        self._ask_about |= numbers

    def _known_to(self, view: LineSnapshot, observed: Observed) -> frozenset[int]:
        """What the view speaks of; what is at rest and yet listed must be asked about again."""
        listed = {
            number
            for number, version in self._at_rest.items()
            if isinstance(observed, Known) and version.name in observed.adapters
        }
        return (self._ask_about - listed) | {d.version for d in view.desired} | view.others.keys()

    async def _observe_engine(self, relied_on: Collection[str]) -> tuple[Observed, frozenset[int]]:
        """What the engine and the disk hold, and the version numbers that occur there."""
        try:
            snapshot, pause = await asyncio.gather(
                self._engine.snapshot(), self._observe_pause(), return_exceptions=True
            )
            if isinstance(snapshot, BaseException):
                raise snapshot
            if isinstance(pause, BaseException):
                raise pause
            local = self._cache.local(relied_on)
        except EngineError as error:
            silent = isinstance(error, (EngineTimeout, EngineUnreachable))
            return Unknown(cause_of(error), gone=is_gone(error), silent=silent), self._ask_about
        except OSError as error:
            return Unknown(f"cache {self._cache.home}: {error.strerror}"), self._ask_about
        if self._no_pause_route not in {None, snapshot.incarnation}:
            self._no_pause_route = None  # a new process may have the route: ask next time
        elif pause.no_route:
            self._no_pause_route = snapshot.incarnation
        observed = Known(
            incarnation=snapshot.incarnation,
            adapters={a.name: a.path for a in snapshot.models.adapters},
            busy=snapshot.busy,
            stepped=snapshot.stepped,
            base=snapshot.models.base.name,
            home=self._cache.home,
            local=local,
            paused=pause.paused,
            pause_cause=pause.cause,
            unanswered=pause.unanswered,
            adapter_ids=self._worker_slots.of(snapshot.incarnation),
            verified=self._cache.verified(local),
            stale_caches=self._present_stale_caches(),
            over_limit=self._cache.exceeds_limit(),
        )
        return observed, self._numbers(observed)

    async def _observe_pause(self) -> _PauseSeen:
        if self._no_pause_route is not None:
            return _NO_ROUTE
        try:
            return _PauseSeen(await self._engine.is_paused(limit_s=self._engine.timeouts.observe_s))
        except RouteMissing:
            return _NO_ROUTE
        except EngineTimeout as error:
            return _PauseSeen(cause=cause_of(error), unanswered=cause_of(error))
        except EngineError as error:
            return _PauseSeen(cause=cause_of(error))

    def _numbers(self, observed: Known) -> frozenset[int]:
        names = [
            *observed.adapters,
            *(copy_name.rpartition("-")[0] for copy_name in observed.local),
        ]
        found = (parse_policy_name(self._line, name) for name in names)
        return frozenset(number for number in found if number is not None)

    async def _read_ledger(self, also: frozenset[int]) -> LineSnapshot | Unknown:
        try:
            view = await asyncio.to_thread(
                self._ledger.view, self._line, also, replica=self._replica
            )
        except LedgerUnavailable as error:
            return Unknown(str(error))
        if view.ledger_id != self._ledger.ledger_id:
            raise LedgerReplaced(
                self._ledger.shown_url, was=self._ledger.ledger_id, found=view.ledger_id
            )
        return view


def can_honour(observation: Observation, acked: Mapping[int, str | None], incarnation: str) -> bool:
    """Whether the engine lists every version that this incarnation holds an ack for.

    Args:
        observation: of engine and ledger, which was asked about all versions in `acked`.
        acked: version -> incarnation of the last ack.
        incarnation: the one that runs.
    """
    if not isinstance(observation.desired, Desired) or not isinstance(observation.observed, Known):
        return False
    for number, holder in acked.items():
        version = observation.desired.version(number)
        if holder == incarnation and (version is None or not observation.observed.lists(version)):
            return False
    return True


def desired_from(view: LineSnapshot, replica: str) -> Desired:
    """The line as it concerns one replica."""
    row = view.replicas.get(replica)

    def version(published: VersionRow, role: Role | None) -> Version:
        residency = view.residency.get((replica, published.version))
        return Version(
            version=published.version,
            name=policy_name(published.line, published.version),
            digest=published.digest or "",
            role=role,
            reported=None if residency is None else residency.state,
            incarnation=None if residency is None else residency.incarnation,
            manifest=published.manifest or "",
        )

    return Desired(
        line=view.line.line,
        incarnation=None if row is None else row.incarnation,
        paused=view.line.paused,
        wanted=tuple(version(d.row, d.role) for d in view.desired),
        out_of_window=tuple(version(o, None) for _, o in sorted(view.others.items()) if o.digest),
    )


def cause_of(error: Exception) -> str:
    """An error in one line, with its kind and what helps."""
    hint = getattr(error, "hint", "")
    text = str(error)
    shown = f"{text}; {hint}" if hint and hint not in text else text
    return f"{type(error).__name__}: {shown}"


def is_gone(error: BaseException | None) -> bool:
    """Whether the engine's process is gone for certain: dead by its own word, or nobody listens.

    A mistake is cheap: once the same incarnation answers again, its acks count again.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_gone(e) for e in error.exceptions)
    if error is None or isinstance(error, (EngineDead, ConnectionRefusedError)):
        return error is not None
    return is_gone(error.__cause__ or error.__context__)
