"""Alembic migrations of the ledger, shipped in the wheel; `ledger.migrate` runs them."""
