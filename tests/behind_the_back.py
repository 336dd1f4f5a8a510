"""Change a ledger's database without the ledger, as an intruder or an accident would."""

from __future__ import annotations

from ledger import schema


def run_sql(url: str, *statements: str) -> None:
    """Run statements as they are, in one transaction."""
    engine = schema.connect(schema.ledger_url(url))
    try:
        with engine.connect().execution_options(write=True) as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
            connection.commit()
    finally:
        engine.dispose()


def forge(url: str, *statements: str) -> None:
    """Drop the triggers that guard the facts, then run the statements."""
    sqlite = schema.ledger_url(url).get_backend_name() == "sqlite"
    guards = (
        ("DROP TRIGGER events_no_update", "DROP TRIGGER events_no_delete")
        if sqlite
        else ("DROP TRIGGER events_append_only ON events",)
    )
    run_sql(url, *guards, *statements)
