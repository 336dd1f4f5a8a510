"""Change a ledger's database without the ledger, as an intruder or an accident would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import Connection

from policyline.ledger.db.connect import connect, ledger_url


def run_sql(url: str, *statements: str) -> None:
    """Run statements as they are, in one transaction."""
    with transaction(url) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.commit()


@contextmanager
def transaction(url: str) -> Iterator[Connection]:
    """A transaction of somebody else's; it is rolled back unless it is committed."""
    engine = connect(ledger_url(url))
    try:
        with engine.connect().execution_options(write=True) as connection:
            yield connection
    finally:
        engine.dispose()


SQLITE_GUARDS = [
    f"DROP TRIGGER {table}_no_{what}"
    for table, kinds in (
        ("events", ("update", "delete", "second_seq", "second_key")),
        ("rollouts", ("update", "delete", "second_request")),
    )
    for what in kinds
]
POSTGRES_GUARDS = [
    f"DROP TRIGGER {table}_append_only ON {table}" for table in ("events", "rollouts")
]


def forge(url: str, *statements: str) -> None:
    """Drop the triggers that guard the facts, then run the statements."""
    sqlite = ledger_url(url).get_backend_name() == "sqlite"
    run_sql(url, *(SQLITE_GUARDS if sqlite else POSTGRES_GUARDS), *statements)
