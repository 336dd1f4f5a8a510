"""Upgrading and creating a ledger's schema, and checking whether that is needed."""

from __future__ import annotations

import importlib.util
import logging
import shlex
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import URL, Connection, Engine

from policyline.ledger.db.append_lock import take_lock
from policyline.ledger.db.connect import check_local, connect, ledger_url
from policyline.ledger.db.db_errors import translating
from policyline.ledger.db.schema import SCHEMA_REVISION, metadata
from policyline.ledger.errors import (
    BACKUP_HINT,
    Corrupted,
    InvalidUrl,
    LedgerUnavailable,
    Refused,
    SchemaMismatch,
)

log = logging.getLogger(__name__)


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Bring the schema to this release's revision; a no-op when it is there.

    Returns:
        The revision before (None for a new database) and after.

    Raises:
        LedgerUnavailable: the database cannot be opened or written.
        SchemaMismatch: it is newer than this release.
        Corrupted: it is no database, or a ledger that has lost a table.
        Refused: it is something else's database.
        InvalidUrl: it cannot be a file of a database.
    """
    shown_url = engine.url.render_as_string(hide_password=True)
    if engine.dialect.name == "sqlite" and engine.url.database:
        _check_directory(Path(engine.url.database).parent)
    with (
        translating(engine, shown_url),
        engine.connect().execution_options(write=True) as connection,
        connection.begin(),
    ):
        take_lock(connection)
        _refuse_other_database(connection, shown_url)
        before = current_revision(connection)
        if before is not None and before > SCHEMA_REVISION:
            raise _newer(before)
        if before != SCHEMA_REVISION:
            config = Config(attributes={"connection": connection})
            config.set_main_option("script_location", str(_script_location()))
            command.upgrade(config, "head")
    return before, SCHEMA_REVISION


def upgrade_url(url: str) -> tuple[str | None, str]:
    """`upgrade` for a URL; opens and closes the database.

    Raises:
        LedgerUnavailable, SchemaMismatch, Corrupted, Refused, InvalidUrl: as `upgrade`.
    """
    engine = connect(ledger_url(url))
    try:
        return upgrade(engine)
    finally:
        engine.dispose()


def create_if_missing(url: str) -> bool:
    """Create a SQLite ledger that is not there yet, with its directory, and log that.

    Of several processes that start at once one creates it, and the others wait for that.
    Postgres is left alone: there another role may own the database, so `upgrade` is explicit.

    Args:
        url: of the ledger, as for `Ledger`.

    Returns:
        Whether it was created by this call.

    Raises:
        LedgerUnavailable: it cannot be created, or would be on a network file system.
        InvalidUrl: it names no database a ledger can live in.
    """
    parsed = ledger_url(url)
    path = Path(parsed.database or "")
    if parsed.get_backend_name() != "sqlite":
        return False
    check_local(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerUnavailable(
            f"directory {path.parent} cannot be created: {error.strerror}",
            hint="name a path that this user may write to",
        ) from error
    if path.exists() and _has_tables(parsed):
        return False
    before, _ = upgrade_url(url)
    if before is None:
        log.info("created the ledger %s", path, extra={"event": "ledger_created"})
    return before is None


def _has_tables(url: URL) -> bool:
    """Not the file's size: it grows before the tables of a process that creates them are there."""
    engine = connect(url)
    try:
        with translating(engine, url.render_as_string()), engine.connect() as connection:
            return bool(sa.inspect(connection).get_table_names())
    finally:
        engine.dispose()


def check(connection: Connection, shown_url: str) -> None:
    """Require exactly this release's schema.

    Raises:
        SchemaMismatch: older, newer or absent; with the remedy.
        Corrupted: a ledger that has lost a table.
        Refused: it is something else's database.
    """
    found = current_revision(connection)
    if found == SCHEMA_REVISION:
        return
    _refuse_other_database(connection, shown_url)
    if found is not None and found > SCHEMA_REVISION:
        raise _newer(found)
    what = f"has schema {found}" if found else "has no schema"
    raise SchemaMismatch(
        f"ledger {shown_url} {what}, this release needs {SCHEMA_REVISION}",
        found=found,
        wanted=SCHEMA_REVISION,
        hint=f"run: policyline ledger upgrade --ledger {shlex.quote(shown_url)}",
    )


def current_revision(connection: Connection) -> str | None:
    """The revision recorded in the database; None for a database without one."""
    if not sa.inspect(connection).has_table(_REVISION_TABLE):
        return None
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if found is None else str(found)


def missing_tables(connection: Connection) -> list[str]:
    """What a database with this release's schema should have and has not."""
    there = sa.inspect(connection).get_table_names()
    return sorted({*metadata.tables, _REVISION_TABLE}.difference(there))


_REVISION_TABLE = "alembic_version"


def _refuse_other_database(connection: Connection, shown_url: str) -> None:
    """Let a ledger pass, and what can become one.

    A file is a ledger's alone; a Postgres database may hold other tables, as long as no name is
    taken.
    """
    there = set(sa.inspect(connection).get_table_names())
    ours = there & metadata.tables.keys()
    if 2 * len(ours) > len(metadata.tables):  # a table alone may be called `runs` elsewhere too
        revision = current_revision(connection) if _REVISION_TABLE in there else ""
        if revision is None:
            raise Corrupted(
                f"ledger {shown_url} is damaged: it has lost the revision of its schema",
                hint=BACKUP_HINT,
            )
        if revision and revision != SCHEMA_REVISION:
            return
        if missing := missing_tables(connection):
            names = ", ".join(missing)
            raise Corrupted(
                f"ledger {shown_url} is damaged: without table {names}", hint=BACKUP_HINT
            )
        return
    in_the_way = there
    if connection.dialect.name != "sqlite":
        in_the_way = ours | (there & {_REVISION_TABLE})
    if in_the_way:
        names = ", ".join(sorted(in_the_way)[:5])
        raise Refused(
            f"{shown_url} is no ledger: it holds something else's tables ({names})",
            hint="name the ledger's own database, or a new one",
        )


def _check_directory(directory: Path) -> None:
    """SQLite makes files, no directories."""
    if directory.is_dir():
        return
    first = next(p for p in (directory, *directory.parents) if p.exists())
    if not first.is_dir():
        raise InvalidUrl(f"{first} is a file, no directory", hint="name a path in a directory")
    raise LedgerUnavailable(f"directory {directory} does not exist", hint="create it first")


def _newer(found: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"the ledger's schema {found} is newer than {SCHEMA_REVISION}, which this release knows",
        found=found,
        wanted=SCHEMA_REVISION,
        hint="install the newer release of policyline here too",
    )


def _script_location() -> Path:
    """The directory of the `migrations` package, also when installed from a wheel."""
    spec = importlib.util.find_spec("policyline.migrations")
    if spec is None or spec.origin is None:
        raise LedgerUnavailable(
            "the package `policyline.migrations` is not installed", hint="reinstall policyline"
        )
    return Path(spec.origin).parent
