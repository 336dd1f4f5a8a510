"""docs/backup.md, followed to the letter: copies made under load add up and can be gone on with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.read.verify import verify
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage
from policyline.storage_check import check_storage
from tests.integration.ledger.test_queries import rollout
from tests.ledger_builders import FACTS, LINE, acknowledge, publish
from tests.postgres import PostgresServer, fresh_database, program
from tests.unit.publisher.builders import write_adapter

DOCS = Path(__file__).parents[3] / "docs" / "backup.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)
BACKUP, VACUUM, DUMP, RESTORE, EXPORT, VERIFY = BLOCKS

Restore = Callable[[str], str]
"""Backs the ledger of a URL up, and returns the URL of what was restored from it."""


def shell(script: str, place: Path, **variables: str) -> None:
    """As a person would at a prompt."""
    programs = [Path(program("pg_dump")).parent, Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
    env = os.environ | {"PATH": path} | variables
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", script],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["backup", "vacuum", "dump", "sqlite to postgres", "postgres to sqlite"])
def way(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer
) -> Iterator[tuple[str, Restore]]:
    """(URL of a ledger, how it is backed up and restored)."""
    sqlite, restored = str(tmp_path / "run.db"), str(tmp_path / "copy.db")
    with contextmanager(fresh_database)(postgres, "template1") as empty:

        def by_copy(script: str) -> Restore:
            def restore(_url: str) -> str:
                shell(script, tmp_path)
                return restored

            return restore

        def by_dump(url: str) -> str:
            shell(DUMP, tmp_path, LEDGER=url)
            shell(RESTORE, tmp_path, RESTORED=empty)
            return empty

        def by_export(url: str) -> str:
            target = restored if url.startswith("postgres") else empty
            shell(EXPORT, tmp_path, POLICYLINE_LEDGER=url, RESTORED=target)
            return target

        ways: dict[str, tuple[str, Restore]] = {
            "backup": (sqlite, by_copy(BACKUP)),
            "vacuum": (sqlite, by_copy(VACUUM)),
            "dump": ("postgres", by_dump),
            "sqlite to postgres": (sqlite, by_export),
            "postgres to sqlite": ("postgres", by_export),
        }
        url, restore = ways[request.param]
        if url == "postgres":
            yield request.getfixturevalue("postgres_url"), restore
            return
        shutil.copy(request.getfixturevalue("sqlite_url"), sqlite)
        yield sqlite, restore


@contextmanager
def working(url: str) -> Iterator[None]:
    """A trainer, a sidecar and a router go on meanwhile."""
    stop, under_way = threading.Event(), threading.Event()

    def work() -> None:
        with Ledger(url) as ledger:
            claim = ledger.open_run("r1")
            member = ledger.join(LINE, "r0", FACTS)
            number = 0
            while not stop.is_set():
                manifest = publish(ledger, claim)
                acknowledge(ledger, member, manifest)
                ledger.record_rollouts(LINE, f"b{number}", [rollout(number, manifest.version)])
                number += 1
                if number == 20:
                    under_way.set()
            ledger.release(claim)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert under_way.wait(30)
        yield
    finally:
        stop.set()
        thread.join(30)


def test_a_copy_made_under_load_adds_up_and_goes_on(way: tuple[str, Restore]) -> None:
    url, restore = way
    with working(url):
        copy = restore(url)
    with Ledger(url) as ledger, Ledger(copy) as restored:
        seq, last_hash = restored.head()
        assert 60 < seq <= ledger.head()[0]
        (there,) = ledger.events(after=seq - 1, limit=1)
        assert there.hash == last_hash
        assert restored.ledger_id == ledger.ledger_id
        assert verify(restored).problems == ()
        claim = restored.open_run("r1", take_over=True)
        acknowledge(restored, restored.join(LINE, "r0", FACTS), publish(restored, claim))
        restored.record_rollouts(LINE, "new", [rollout(99_999, 1)])
        assert verify(restored).problems == ()


def test_a_plain_copy_of_the_file_misses_events(sqlite_url: str, tmp_path: Path) -> None:
    """Why the documentation says what it says."""
    with Ledger(sqlite_url) as ledger:
        ledger.reserve(ledger.open_run("r1"))
        shutil.copy(sqlite_url, tmp_path / "plain.db")
        with Ledger(str(tmp_path / "plain.db")) as copy:
            assert copy.head()[0] < ledger.head()[0] == 2


def test_an_older_copy_is_found_by_what_storage_holds(
    way: tuple[str, Restore], tmp_path: Path
) -> None:
    """Whole in itself, it lacks versions whose manifests carry the chain's head as a witness."""
    url, restore = way
    for place in ("storage", "elsewhere"):
        (tmp_path / place).mkdir()
    storage = DirectoryStorage(tmp_path / "storage")
    with Ledger(url) as ledger, Publisher(ledger, storage, run="r1") as publisher:
        publisher.publish(write_adapter(tmp_path / "one", seed=1))
        copy = restore(url)
        publisher.publish(write_adapter(tmp_path / "two", seed=2))
    shell(VERIFY, tmp_path, POLICYLINE_LEDGER=url, STORAGE=str(storage.root))
    with Ledger(copy) as older:
        assert verify(older).problems == ()
        told = [p.what for p in check_storage(older, storage)]
        assert told[0] == "storage has trl-policy-v2, which this ledger has not published"
        assert "trl-policy-v2 was anchored at event" in told[1]
        assert "the ledger was cut off" in told[1]
        # the worst: it goes on, and uses the number again for other bytes
        elsewhere = DirectoryStorage(tmp_path / "elsewhere")
        with Publisher(older, elsewhere, run="r1", take_over=True) as publisher:
            publisher.publish(write_adapter(tmp_path / "three", seed=3))
        assert verify(older).problems == ()
        (told_then,) = [p.what for p in check_storage(older, storage)]
        assert told_then.startswith("trl-policy-v2: ")
