"""How every verb appends: one serialised transaction, folded, settled, signalled."""

from __future__ import annotations

import functools
import getpass
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy.engine import Connection

from policyline.ledger.append.append_cache import Memory, Recent
from policyline.ledger.append.transitions import READINESS_KINDS, follow
from policyline.ledger.append.unit_of_work import Journal
from policyline.ledger.canonical import storable
from policyline.ledger.db import migrate, schema
from policyline.ledger.db.signals import Signal, signal_for
from policyline.ledger.db.sqlite_file import OpenedFile
from policyline.ledger.db.transaction import attempt, begin, lock_head, take_lock
from policyline.ledger.errors import LedgerError, LedgerUnavailable
from policyline.ledger.events import Event, NewEvent
from policyline.ledger.read.queries import Reads
from policyline.ledger.readiness import NOTHING_ELAPSED
from policyline.ledger.rows import LineRow

L = TypeVar("L", bound="Writing")
P = ParamSpec("P")
T = TypeVar("T")


def appends(
    verb: Callable[Concatenate[L, Journal, P], T],
) -> Callable[Concatenate[L, P], T]:
    """Make a verb one transaction: it is called with a journal, perhaps twice, and never half done.

    On Postgres the first attempt takes no lock: it reads, and writes with one statement that does
    nothing unless the head is still the one it read (every change of a row moves the head). When
    somebody was faster, or the verb refused, which it may have done for what it saw half changed,
    it is called again under the lock, and that counts. Right after an append of the same process
    an attempt comes before it that reads nothing it remembers (`append_cache`).
    """

    @functools.wraps(verb)
    def call(ledger: L, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def work(journal: Journal) -> T:
            return verb(ledger, journal, *args, **kwargs)

        return ledger.transact(work)

    return call


class Writing(Reads):
    """A version ledger in SQLite or Postgres. Synchronous and thread-safe; daemons use threads.

    Args:
        url: `sqlite:///file.db`, a plain path, or `postgresql://user@host/name`.
        actor: who appends, as shown to auditors; default user@host:pid.
        clock: gives the time to record, UTC; it is never allowed to go back.

    Raises:
        LedgerUnavailable: the database cannot be reached.
        SchemaMismatch: it has another schema; run `policyline ledger upgrade`.
    """

    def __init__(
        self,
        url: str,
        *,
        actor: str | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        parsed = schema.ledger_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        """Whether the database is a SQLite file; otherwise it is Postgres."""
        super().__init__(schema.connect_kept(parsed), parsed.render_as_string(hide_password=True))
        self._actor = actor or default_actor()
        self._clock = clock
        self._kept = schema.connect_to_write(self._engine) if self.is_sqlite else None
        self._signal = signal_for(self._engine)
        self._recent = Memory()
        if self.is_sqlite and not Path(parsed.database or "").exists():
            raise LedgerUnavailable(
                f"ledger {self.shown_url} does not exist",
                hint=f"run: policyline ledger upgrade --ledger {shlex.quote(self.shown_url)}",
            )
        try:
            if self.is_sqlite:
                self._file = OpenedFile(Path(parsed.database or ""))
            with self._reading() as connection:
                migrate.check(connection, self.shown_url)
                self._ledger_id = self._head(connection)[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._kept is not None:
            self._kept.close()
        self._engine.dispose()

    @property
    def actor(self) -> str:
        """Who this ledger object appends as."""
        return self._actor

    @property
    def ledger_id(self) -> str:
        """The ledger's identity (32 hex digits); a restored copy keeps it, a new one differs."""
        return self._ledger_id

    @property
    def signal(self) -> Signal:
        """What wakes readers after a commit."""
        return self._signal

    def transact(self, work: Callable[[Journal], T]) -> T:
        """Run `work` in one transaction that appends, and wake readers after it; see `appends`."""
        if not self.is_sqlite:
            done = self._attempt(work)
            if done is not None:
                return done[0]
        with self._writing() as journal:
            return work(journal)

    def _attempt(self, work: Callable[[Journal], T]) -> tuple[T] | None:
        """Without the lock; None when it must be done again under it."""
        recent = self._recent.take()
        if recent is not None:
            done = self._attempt_from(recent, work)
            self._recent.tell(hit=done is not None)
            if done is not None:
                return done
        return self._attempt_from(None, work)

    def _attempt_from(self, recent: Recent | None, work: Callable[[Journal], T]) -> tuple[T] | None:
        """Begin with what `recent` says, which is true if nobody has appended since."""
        reading = True
        with self._translating():
            try:
                with attempt(self._engine, recent.head if recent else None) as transaction:
                    known = recent.rows if recent else {}
                    journal = Journal(transaction, self._engine.dialect, self._now(), known)
                    result = work(journal)
                    if recent is not None and not journal.appended:
                        return None  # who appends nothing is not told when the head has moved
                    reading = False
                    done = not journal.appended or journal.commit()
            except LedgerUnavailable:
                raise
            except LedgerError:
                return None
            except self._engine.dialect.loaded_dbapi.Error:
                # a pooled connection that the server closed meanwhile; once the writes were sent,
                # nobody knows whether they were done
                if not reading:
                    raise
                return None
        if done and journal.appended:
            self._recent.keep(journal.outcome())
        return (result,) if done else None

    @contextmanager
    def _writing(self) -> Iterator[Journal]:
        """One serialised transaction; readers are woken after its commit."""
        with self._translating():
            with begin(self._engine, self._kept) as transaction:
                known = self._recent.at(transaction.head)
                journal = Journal(transaction, self._engine.dialect, self._now(), known)
                yield journal
                if journal.appended:
                    journal.commit()
            if journal.appended:
                self._recent.keep(journal.outcome())
                self._signal.after_commit()

    @contextmanager
    def exclusive(self) -> Iterator[Connection]:
        """A plain transaction that holds the ledger's lock, for bulk work; commits at the end."""
        with self._translating():
            with self._engine.connect() as plain:
                connection = plain.execution_options(**schema.writes(self._engine))
                take_lock(connection)
                lock_head(connection)
                yield connection
                connection.commit()
            self._signal.after_commit()

    def _now(self) -> str:
        return self._clock().astimezone(UTC).isoformat(timespec="microseconds")

    def _append(
        self,
        journal: Journal,
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
            row = journal.get(LineRow, (line,))
            run = (row.open_run if row else None) or ""
        event = journal.append(
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
            follow(journal, line, self._actor, NOTHING_ELAPSED)
        return event


def _new_key() -> str:
    """Unique, and beginning with the time, so that an index of keys grows at its end."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def default_actor() -> str:
    """user@place:pid of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = str(os.getuid())
    return f"{user}@{process_place()}:{os.getpid()}"


def place_of(actor: str) -> tuple[str, str]:
    """Host and process id, as text, of an actor `user@host:pid`."""
    host, _, pid = actor.rpartition("@")[2].rpartition(":")
    return host, pid


def process_place() -> str:
    """Where a pid means one process: the host, and inside a container its pid namespace too.

    Two containers may share a host's name (host networking) while their pids count separately.
    """
    host = socket.gethostname()
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return host
    return host if namespace == _HOST_PIDS else f"{host}/{namespace.strip('pid:[]')}"


_HOST_PIDS = "pid:[4026531836]"
"""PROC_PID_INIT_INO in linux/proc_ns.h: the namespace of a process that is in no container."""
