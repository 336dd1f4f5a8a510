"""Alembic environment: migrates the one connection it is handed by `ledger.db.migrate`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
