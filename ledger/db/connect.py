"""Ledger URLs, and connections set up for durable, serialised appends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from policyline.ledger.db import schema
from policyline.ledger.db.pool import SharedConnectionPool, check_open
from policyline.ledger.db.sqlite_file import network_type
from policyline.ledger.db.sqlite_writer import WriteConnection, begin_immediate
from policyline.ledger.errors import InvalidUrl, LedgerUnavailable

BUSY_TIMEOUT_S = 10.0
"""How long a writer waits for another. An append takes milliseconds, so ten seconds means that
a process holds the lock and is stuck."""

_URL_HINT: Final = "write sqlite:///file.db, a plain path, or postgresql://user@host/name"


def ledger_url(text: str) -> URL:
    """Read a ledger URL; a plain path means SQLite.

    Raises:
        InvalidUrl: not a URL, or a database that is not supported.
    """
    if "://" not in text:
        return URL.create("sqlite", database=str(Path(text).expanduser().resolve()))
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError) as error:  # a port that is no number
        raise InvalidUrl("the ledger's URL cannot be read", hint=_URL_HINT) from error
    backend = url.get_backend_name()
    if backend == "sqlite" and url.database:
        return url.set(database=str(Path(url.database).expanduser().resolve()))
    if backend in {"postgresql", "postgres"}:
        return url.set(drivername="postgresql+psycopg")
    raise InvalidUrl(f"a ledger cannot live in {backend!r}", hint=_URL_HINT)


def check_local(path: Path) -> None:
    """Refuse SQLite on a network file system.

    Args:
        path: of the database, which need not be there yet.

    Raises:
        LedgerUnavailable: names the type of file system and the remedy.
    """
    kind = network_type(path.parent)
    if kind is not None:
        raise LedgerUnavailable(
            f"ledger {path} is on a network file system ({kind}), where SQLite's locks do not "
            "hold and two processes can destroy it",
            hint="use postgresql://, or a path on a local disk",
        )


def connect(url: URL) -> Engine:
    """An engine whose connections are set up for durable, serialised appends.

    SQLite: WAL; synchronous=FULL, because in WAL mode NORMAL may lose the last commits at a power
    cut (sqlite.org/pragma.html#pragma_synchronous), which I5 forbids; and explicit BEGIN, because
    a deferred transaction that reads and then writes fails at once with SQLITE_BUSY_SNAPSHOT,
    which no timeout helps.
    """
    if url.get_backend_name() != "sqlite":
        return _postgres_engine(url, isolation_level="READ COMMITTED")
    check_local(Path(url.database or ""))
    engine = sa.create_engine(url.set(query={}), connect_args={"timeout": BUSY_TIMEOUT_S})

    def set_up(dbapi_connection: Any, _record: object) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        if not _is_something_elses(cursor):  # that file is refused, and not changed before that
            cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("write", False):
            begin_immediate(_driver(connection).cursor(), BUSY_TIMEOUT_S)
        else:
            connection.exec_driver_sql("BEGIN")

    sa.event.listen(engine, "connect", set_up)
    sa.event.listen(engine, "begin", begin)
    return engine


def _is_something_elses(cursor: Any) -> bool:
    """Whether the SQLite file has tables, and they are no ledger's."""
    names = {name for (name,) in cursor.execute("SELECT name FROM sqlite_master")}
    return bool(names) and not names >= {schema.head.name, schema.events.name}


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


def writes(engine: Engine) -> dict[str, Any]:
    """Options of a plain connection of `connect_shared` that is to write in one transaction."""
    if engine.dialect.name == "sqlite":
        return {"write": True}
    return {"isolation_level": "READ COMMITTED"}


def connect_to_write(engine: Engine) -> WriteConnection:
    """The connection for `Ledger`'s appends to SQLite, opened when it is first needed."""

    def connect() -> Any:
        pooled = engine.raw_connection()
        driver = pooled.driver_connection
        pooled.detach()
        return driver

    return WriteConnection(connect, BUSY_TIMEOUT_S)


def connect_shared(url: URL) -> Engine:
    """An engine for `Ledger`: on Postgres one connection serves all that a process does.

    The connection is in autocommit mode, for `transaction`; reads ask for their snapshots.
    It is not pinged, which would cost every append a round trip.
    """
    if url.get_backend_name() == "sqlite":
        return connect(url)
    # a heartbeat is one statement in autocommit mode: at a stricter level it might not serialise
    options = (
        f"-c lock_timeout={int(BUSY_TIMEOUT_S * 1000)} "
        "-c default_transaction_isolation=read\\ committed"
    )
    engine = _postgres_engine(
        url,
        poolclass=SharedConnectionPool,
        isolation_level="AUTOCOMMIT",
        connect_args={"options": options, **_KEEPALIVE},
    )
    sa.event.listen(engine, "checkout", check_open)
    return engine


def _postgres_engine(url: URL, **options: Any) -> Engine:
    """An engine for Postgres.

    Raises:
        InvalidUrl: its driver is not installed.
    """
    try:
        return sa.create_engine(url, **options)
    except ImportError as error:
        raise InvalidUrl(
            f"a ledger in Postgres needs the driver psycopg, which cannot be imported ({error})",
            hint="run: pip install 'policyline[postgres]'",
        ) from error


_KEEPALIVE: Final = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3}
"""A listener only reads, so without these it would never notice that its server's host is gone
(libpq; no effect on a Unix socket)."""
