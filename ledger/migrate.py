"""Upgrading a ledger's schema, and telling whether it needs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection, Engine

from ledger.errors import LedgerUnavailable, SchemaMismatch
from ledger.schema import SCHEMA_REVISION, connect, ledger_url
from ledger.transaction import take_lock
from ledger.translation import translating


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Bring the schema to this release's revision; a no-op when it is there.

    Returns:
        The revision before (None for a new database) and after.

    Raises:
        LedgerUnavailable: the database cannot be opened or written.
        SchemaMismatch: it is newer than this release.
        Corrupted: it is no database.
    """
    database = engine.url.database
    if engine.dialect.name == "sqlite" and database and not Path(database).parent.is_dir():
        raise LedgerUnavailable(
            f"directory {Path(database).parent} does not exist", hint="create it first"
        )
    with (
        translating(engine, engine.url.render_as_string(hide_password=True)),
        engine.connect().execution_options(write=True) as connection,
        connection.begin(),
    ):
        take_lock(connection)
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
        LedgerUnavailable, SchemaMismatch: as `upgrade`.
    """
    engine = connect(ledger_url(url))
    try:
        return upgrade(engine)
    finally:
        engine.dispose()


def check(connection: Connection, shown_url: str) -> None:
    """Require exactly this release's schema.

    Raises:
        SchemaMismatch: older, newer or absent; with the remedy.
    """
    found = current_revision(connection)
    if found == SCHEMA_REVISION:
        return
    if found is not None and found > SCHEMA_REVISION:
        raise _newer(found)
    what = f"has schema {found}" if found else "has no schema"
    raise SchemaMismatch(
        f"ledger {shown_url} {what}, this release needs {SCHEMA_REVISION}",
        found=found,
        wanted=SCHEMA_REVISION,
        hint=f"run: policyline ledger upgrade --ledger {shown_url}",
    )


def current_revision(connection: Connection) -> str | None:
    """The revision recorded in the database; None for a database without one."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if found is None else str(found)


def _newer(found: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"the ledger's schema {found} is newer than {SCHEMA_REVISION}, which this release knows",
        found=found,
        wanted=SCHEMA_REVISION,
        hint="install the newer release of policyline here too",
    )


def _script_location() -> Path:
    """The directory of the `migrations` package, also when installed from a wheel."""
    spec = importlib.util.find_spec("migrations")
    if spec is None or spec.origin is None:
        raise LedgerUnavailable(
            "the package `migrations` is not installed", hint="reinstall policyline"
        )
    return Path(spec.origin).parent
