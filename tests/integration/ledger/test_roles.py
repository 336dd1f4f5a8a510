"""What the database itself refuses: changing facts, to anybody; more than their part, to roles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import Refused
from policyline.ledger.read.audit import audit
from policyline.ledger.read.replay import replay
from policyline.ledger.read.verify import verify
from policyline.ledger.readiness import Elapsed
from policyline.ledger.rollouts import RolloutFilter
from policyline.ledger.transfer import export, repair_projections
from tests.behind_the_back import run_sql
from tests.integration.ledger.test_queries import rollout
from tests.ledger_builders import FACTS, LINE, acknowledge, manifest_for, publish
from tests.postgres import PostgresServer, start_private

DOCS = Path(__file__).parents[3] / "docs" / "postgres.md"

EVERYWHERE = (
    "UPDATE events SET actor = 'x'",
    "UPDATE events SET actor = 'x' WHERE seq = 2",
    "DELETE FROM events",
    "DELETE FROM events WHERE seq = 2",
    "INSERT INTO events SELECT * FROM events WHERE true ON CONFLICT (seq) DO UPDATE SET kind = 'x'",
    "UPDATE rollouts SET version = 2",
    "DELETE FROM rollouts WHERE request = 'req-1'",
)
ON_SQLITE = (
    "REPLACE INTO events SELECT * FROM events WHERE seq = 2",
    """
    INSERT OR REPLACE INTO events
        (seq, line, run, kind, actor, key, payload, recorded_at, prev_hash, hash)
    SELECT 99, line, run, kind, 'x', key, payload, recorded_at, prev_hash, hash
        FROM events WHERE seq = 2
    """,
    "UPDATE OR REPLACE events SET seq = 3 WHERE seq = 2",
    "REPLACE INTO rollouts SELECT * FROM rollouts",
)
ON_POSTGRES = (
    "TRUNCATE events",
    "TRUNCATE rollouts",
    "MERGE INTO events e USING lines l ON e.line = l.line WHEN MATCHED THEN DELETE",
    "WITH gone AS (DELETE FROM events RETURNING *) SELECT count(*) FROM gone",
)


def live(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    acknowledge(ledger, ledger.join(LINE, "r0", FACTS), publish(ledger, claim))
    ledger.record_rollouts(LINE, "b1", [rollout(1, 1)])


def test_the_database_itself_refuses_to_change_facts(ledger_url: str, ledger: Ledger) -> None:
    live(ledger)
    before = list(export(ledger))
    for statement in (*EVERYWHERE, *(ON_SQLITE if ledger.is_sqlite else ON_POSTGRES)):
        with pytest.raises(DBAPIError, match="append-only"):
            run_sql(ledger_url, statement)
        assert list(export(ledger)) == before, statement


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One whose roles are ours."""
    yield from start_private()


@pytest.fixture(scope="module")
def as_role(server: PostgresServer) -> Callable[[str], str]:
    """The URL of the ledger for a role, all set up as docs/postgres.md says."""
    blocks = re.findall(r"```sql\n-- (as .*?), in (.*?)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert [who for who, _, _ in blocks] == ["as an administrator", "as policyline_owner"]
    for statement in filter(str.strip, blocks[0][2].split(";")):
        server.execute(statement)  # each alone: CREATE DATABASE runs in no transaction

    def url(role: str) -> str:
        place = make_url(server.url).set(username=f"policyline_{role}", database="policyline")
        return place.render_as_string(hide_password=False)

    upgrade_url(url("owner"))
    with psycopg.connect(url("owner")) as owner:
        owner.execute(blocks[1][2].encode())
    return url


def test_the_writer_can_do_every_verb(as_role: Callable[[str], str]) -> None:
    with Ledger(as_role("writer")) as ledger:
        claim = ledger.open_run("r1")
        r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
        for _ in range(3):
            manifest = manifest_for(ledger.reserve(claim))
            ledger.publish(claim, manifest, phases={"save": 0.1})
            for member in (r0, r1):
                ledger.fetched(member, manifest.version, manifest.digest)
                acknowledge(ledger, member, manifest)
        ledger.evicted(r0, 1, digest=ledger.version(LINE, 1).digest or "", reason="outside")
        ledger.load_failed(r1, 1, digest="0" * 64, reason="x", permanent=False)
        ledger.foreign_adapter_seen(r1, "x", "/x", "test")
        ledger.beat(r0, 1)
        ledger.change_incarnation(r1, FACTS)
        assert ledger.declare_lost(LINE, "r1", generation=1, counter=0, reason="silent")
        ledger.leave(r0, "done")
        ledger.settle(LINE, 9, Elapsed(timed_out=True))
        ledger.reject(claim, ledger.reserve(claim).version, "NaN")
        ledger.withdraw(LINE, 1, "bad")
        ledger.pin(LINE, 2, serve=True)
        ledger.unpin(LINE, 2)
        ledger.pause(LINE, "x")
        ledger.resume(LINE)
        ledger.record_rollouts(LINE, "b1", [rollout(1, 1)])
        ledger.roll_back(LINE, 2, "bad")
        ledger.release(ledger.open_run("r1"))
        ledger.close_run("r1")
        assert verify(ledger).problems == ()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET actor = 'x'",
        "DELETE FROM events",
        "TRUNCATE events",
        "UPDATE rollouts SET version = 1",
        "DELETE FROM rollouts",
        "TRUNCATE rollouts",
        "DELETE FROM versions",
        "DROP TRIGGER events_append_only ON events",
        "ALTER TABLE events DISABLE TRIGGER ALL",
        "ALTER TABLE events ADD COLUMN more text",
        "DROP TABLE events",
        """
        CREATE OR REPLACE FUNCTION policyline_append_only() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RETURN NULL; END $$
        """,
        "SET session_replication_role = replica",
        "UPDATE alembic_version SET version_num = '9999'",
        "CREATE TABLE mine (a int)",
    ],
)
@pytest.mark.parametrize("role", ["writer", "reader"])
def test_neither_writer_nor_reader_can_change_the_past(
    as_role: Callable[[str], str], role: str, statement: str
) -> None:
    with pytest.raises(DBAPIError, match=r"permission denied|must be owner"):
        run_sql(as_role(role), statement)


@pytest.mark.parametrize(
    "statement", ["UPDATE events SET actor = 'x'", "DELETE FROM rollouts", "TRUNCATE events"]
)
def test_not_even_the_owner_changes_the_past_by_accident(
    as_role: Callable[[str], str], statement: str
) -> None:
    with pytest.raises(DBAPIError, match="append-only"):
        run_sql(as_role("owner"), statement)


def test_the_reader_reads_everything_and_appends_nothing(as_role: Callable[[str], str]) -> None:
    with Ledger(as_role("writer")) as writer:
        publish(writer, writer.open_run("of-reader", line="read"))
    with Ledger(as_role("reader")) as ledger:
        head = ledger.head()
        assert ledger.view("read").run is not None
        assert audit(ledger, "read", 1).row.state == "published"
        assert len(list(replay(ledger, "of-reader"))) == 4
        assert list(ledger.rollouts(RolloutFilter(line="none"))) == []
        assert verify(ledger).problems == ()
        assert len(list(export(ledger))) > head[0]
        verbs: list[Callable[[], object]] = [
            lambda: ledger.open_run("mine"),
            lambda: ledger.join("read", "r9", FACTS),
            lambda: ledger.pause("read", "x"),
            lambda: ledger.record_rollouts("read", "b", [rollout(9, 1)]),
            lambda: repair_projections(ledger),
        ]
        for verb in verbs:
            with pytest.raises(Refused, match=r"permission denied.*docs/postgres\.md"):
                verb()
        assert ledger.head() == head


def test_projections_are_rebuilt_by_the_owner(as_role: Callable[[str], str]) -> None:
    with Ledger(as_role("owner")) as owner, Ledger(as_role("writer")) as writer:
        with pytest.raises(Refused, match="permission denied"):
            repair_projections(writer)
        assert repair_projections(owner) == owner.head()[0]
        assert verify(owner).problems == ()
