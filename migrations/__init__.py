"""Alembic migrations of the ledger, shipped in the wheel; `ledger.db.migrate` runs them."""
