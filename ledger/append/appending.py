"""How every verb appends: one serialised transaction, folded, settled, signalled."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, TypeVar

from policyline.ledger.actor import default_actor
from policyline.ledger.append.transitions import READINESS_KINDS, follow
from policyline.ledger.append.unit_of_work import UnitOfWork
from policyline.ledger.canonical import storable
from policyline.ledger.db.database import Database
from policyline.ledger.db.transaction import begin
from policyline.ledger.events import Event, NewEvent
from policyline.ledger.readiness import NOTHING_ELAPSED
from policyline.ledger.rows import LineRow

L = TypeVar("L", bound="Appending")
P = ParamSpec("P")
T = TypeVar("T")


def appends(
    verb: Callable[Concatenate[L, UnitOfWork, P], T],
) -> Callable[Concatenate[L, P], T]:
    """Make a verb one transaction under the ledger's lock, and wake readers after it.

    The verb is called with the transaction's unit of work; what it raises undoes everything.
    """

    @functools.wraps(verb)
    def call(ledger: L, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with ledger._appending() as unit:  # noqa: SLF001 - a decorator of its methods
            return verb(ledger, unit, *args, **kwargs)

    return call


class Appending(Database):
    """A ledger's database with the means to append to it.

    Args:
        url: `sqlite:///file.db`, a plain path, or `postgresql://user@host/name`.
        actor: who appends, as shown to auditors; default user@host:pid.
        clock: gives the time to record, UTC; it is never allowed to go back.

    Raises:
        InvalidUrl, LedgerUnavailable, SchemaMismatch: as `Database`.
    """

    def __init__(
        self,
        url: str,
        *,
        actor: str | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        super().__init__(url)
        self._actor = actor or default_actor()
        self._clock = clock

    @property
    def actor(self) -> str:
        """Who this ledger object appends as."""
        return self._actor

    @contextmanager
    def _appending(self) -> Iterator[UnitOfWork]:
        """One serialised transaction; readers are woken after its commit."""
        with self._translating():
            with begin(self._engine, self._write_connection) as transaction:
                now = self._clock().astimezone(UTC).isoformat(timespec="microseconds")
                unit = UnitOfWork(transaction, self._engine.dialect, now)
                yield unit
                if unit.appended:
                    unit.commit()
            if unit.appended:
                self._signal.after_commit()

    def _append(
        self,
        unit: UnitOfWork,
        kind: str,
        *,
        line: str,
        payload: Mapping[str, Any],
        run: str = "",
        version: int | None = None,
        replica: str | None = None,
        epoch: int | None = None,
        generation: int | None = None,
        key: str | None = None,
    ) -> Event:
        if replica is not None and not run:
            row = unit.get(LineRow, (line,))
            run = (row.open_run if row else None) or ""
        event = unit.append(
            NewEvent(
                kind=kind,
                line=line,
                run=run,
                key=key or _new_key(),
                actor=self._actor,
                payload=storable(payload),
                version=version,
                replica=replica,
                epoch=epoch,
                generation=generation,
            ),
            may_exist=key is not None,
        )
        if kind in READINESS_KINDS:
            follow(unit, line, self._actor, NOTHING_ELAPSED)
        return event


def _new_key() -> str:
    """Unique, and beginning with the time, so that an index of keys grows at its end."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"
