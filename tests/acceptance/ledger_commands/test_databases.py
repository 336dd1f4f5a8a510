"""A database that is not as it should be: schema, server, rights, disk."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from policyline.ledger.db.migrate import upgrade_url
from tests.acceptance.ledger_commands.command import NOBODY, Command, expect, fill, head_of
from tests.behind_the_back import run_sql
from tests.postgres import PostgresServer, fresh_database

READING = ["runs", "status --json", "events", "verify"]
APPENDING = ["open-run r9", "pin 8", "pause --reason x", "close-run r1"]


@pytest.mark.parametrize(("revision", "says"), [("9999", "newer"), ("0000", "ledger upgrade")])
def test_a_schema_behind_or_ahead(run: Command, own: str, revision: str, says: str) -> None:
    run_sql(own, f"UPDATE alembic_version SET version_num = '{revision}'")
    for done in run.all(own, ["status", "open-run r9", "verify", "export -"]).values():
        expect(done, 3, says, revision)
    if says == "newer":
        expect(run(own, "upgrade"), 3, "install the newer release of policyline")
    run_sql(own, "UPDATE alembic_version SET version_num = '0001'")
    head_of(own)


def test_a_database_without_a_schema(run: Command, tmp_path: Path, server: PostgresServer) -> None:
    (tmp_path / "empty.db").touch()
    with contextmanager(fresh_database)(server, "template1") as bare:
        for url in (str(tmp_path / "empty.db"), bare):
            expect(run(url, "status"), 3, "has no schema", "run: policyline ledger upgrade")


def test_a_database_that_is_down_or_not_there(
    run: Command, server: PostgresServer, tmp_path: Path
) -> None:
    with contextmanager(fresh_database)(server) as url:
        fill(url)
        head = head_of(url)
        server.stop()
        try:
            for done in run.all(url, [*READING, *APPENDING, "upgrade", "export -"]).values():
                expect(done, 3, "is unavailable")
        finally:
            server.start_again()
        assert head_of(url) == head
    missing = str(tmp_path / "none.db")
    expect(run(missing, "status"), 3, "does not exist", "run: policyline ledger upgrade")
    expect(run(str(tmp_path / "no" / "none.db"), "upgrade"), 3, "does not exist; create it first")
    expect(run("mysql://x/y", "status"), 2, "cannot live in 'mysql'", "write sqlite:///")
    expect(run("http:", "status"), 3, "does not exist")
    expect(run("postgresql://host:port/name", "status"), 2, "the ledger's URL cannot be read")
    (tmp_path / "file").touch()
    for command in ("status", "upgrade", "verify"):
        a_file = f"name a file in it: {tmp_path}/ledger.db"
        expect(run(str(tmp_path), command), 2, f"{tmp_path} is a directory", a_file)
    below = str(tmp_path / "file" / "sub" / "ledger.db")
    expect(run(below, "upgrade"), 2, f"{tmp_path}/file is a file, no directory")
    nonsense = tmp_path / "nonsense.db"
    nonsense.write_bytes(b"not a database, whatever its name" * 500)
    expect(run(str(nonsense), "status"), 1, "damaged or no ledger", "restore it from a backup")
    expect(run(str(nonsense), "upgrade"), 1, "damaged or no ledger")
    assert not Path(missing).exists()


def test_something_elses_database_is_left_as_it_is(
    run: Command, tmp_path: Path, server: PostgresServer
) -> None:
    """Names of ours may be others' too: MLflow has a table `runs`, and Alembic its own."""
    strange = tmp_path / "strange.db"
    with closing(sqlite3.connect(strange)) as connection:
        connection.execute("CREATE TABLE runs (a)")
    with closing(sqlite3.connect(tmp_path / "alembic.db")) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('3500859a5d39')")
        connection.commit()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path in before:
        expect(run(str(path), "upgrade"), 1, f"{path} is no ledger", "name the ledger's own")
    expect(run(str(strange), "status"), 1, "something else's tables (runs)")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with contextmanager(fresh_database)(server, "template1") as url:
        run_sql(url, "CREATE TABLE another (a int)")
        assert run(url, "upgrade").returncode == 0
    with contextmanager(fresh_database)(server, "template1") as url:
        run_sql(url, "CREATE TABLE runs (a int)")
        expect(run(url, "upgrade"), 1, "something else's tables (runs)", "name the ledger's own")


def test_postgres_that_only_reads(run: Command, server: PostgresServer) -> None:
    """A standby, or a server in maintenance: questions are answered, appends are not."""
    with contextmanager(fresh_database)(server) as url:
        fill(url)
        head = head_of(url)
        name = url.split("/")[-1].split("?")[0]
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        for command, done in run.all(url, READING).items():
            assert done.returncode == 0, f"{command}\n{done.stderr}"
        for done in run.all(url, [*APPENDING, "repair-projections"]).values():
            expect(done, 3, "read-only transaction", "may write")
        assert head_of(url) == head
    with contextmanager(fresh_database)(server, "template1") as url:
        name = url.split("/")[-1].split("?")[0]
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        expect(run(url, "upgrade"), 3, "read-only transaction")


def test_sqlite_that_only_reads(run: Command, tmp_path: Path) -> None:
    place = Path("/tmp") / f"plro{secrets.token_hex(6)}"  # one that another user may enter
    place.mkdir()
    try:
        url = str(place / "ledger.db")
        upgrade_url(url)
        fill(url)
        head = head_of(url)
        for path in place.iterdir():
            path.chmod(0o444)
        place.chmod(0o555)
        user = NOBODY if os.geteuid() == 0 else None
        for done in run.all(url, [*APPENDING, "upgrade"], user=user).values():
            expect(done, 3, "readonly database", "may")
        for done in run.all(url, READING, user=user).values():
            expect(done, 3, "even to read it", f"write to the directory {place},", "immutable")
        place.chmod(0o755)
        for path in place.iterdir():
            path.chmod(0o644)
        assert head_of(url) == head
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of so many bytes; mounting one takes root."""
    place = Path("/tmp") / f"plsmall{secrets.token_hex(6)}"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(place)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("a small disk can only be mounted by root")
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
    finally:
        place.rmdir()


def fill_up(place: Path) -> Path:
    """Leave no byte free; return the file that takes them."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"\0" * 512)
        except OSError:
            return filler


def test_sqlite_on_a_full_disk(run: Command) -> None:
    with small_disk("2m") as place:
        url = str(place / "ledger.db")
        upgrade_url(url)
        fill(url)
        head = head_of(url)
        filler = fill_up(place)
        for done in run.all(url, APPENDING).values():
            expect(done, 3, "not full")
        filler.unlink()
        assert head_of(url) == head
        assert run(url, "pin", "8").returncode == 0


def test_postgres_on_a_full_disk(run: Command, server: PostgresServer) -> None:
    with small_disk("24m") as place:
        space = place / "space"
        space.mkdir()
        if server.embedded.system_user is not None:
            shutil.chown(space, server.embedded.system_user)
        server.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        try:
            server.execute("CREATE DATABASE small TABLESPACE small TEMPLATE policyline_template")
            url = server.database_url("small")
            fill(url)
            head = head_of(url)
            filler = fill_up(place)
            done = run(url, "pause", "--reason", secrets.token_hex(50_000))
            expect(done, 3, "No space left on device", "not full")
            filler.unlink()
            assert head_of(url) == head
            assert run(url, "pause", "--reason", "x").returncode == 0
        finally:
            server.execute("DROP DATABASE IF EXISTS small WITH (FORCE)")
            server.execute("CHECKPOINT")
            server.execute("DROP TABLESPACE small")
