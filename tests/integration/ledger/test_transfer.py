"""Export, import, repair: lossless, and all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import Corrupted, Refused
from policyline.ledger.read.as_of import as_of
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import RolloutFilter
from policyline.ledger.transfer import export, import_into, repair_projections
from tests.behind_the_back import run_sql
from tests.integration.ledger.test_queries import live, rollout
from tests.ledger_builders import LINE


@pytest.fixture
def lived(ledger: Ledger) -> Ledger:
    live(ledger, 8)
    ledger.record_rollouts(LINE, "b1", [rollout(1, 1), rollout(2, 2)])
    return ledger


@pytest.fixture
def empty(tmp_path: Path, request: pytest.FixtureRequest, ledger: Ledger) -> str:
    """An empty ledger in the other kind of database."""
    if not ledger.is_sqlite:
        upgrade_url(str(tmp_path / "other.db"))
        return str(tmp_path / "other.db")
    url: str = request.getfixturevalue("postgres_url")
    return url


def test_a_ledger_moves_to_the_other_database_without_loss(lived: Ledger, empty: str) -> None:
    lines = list(export(lived))
    with Ledger(empty) as other:
        assert import_into(other, lines) == lived.head()[0]
        assert list(export(other)) == lines
        assert other.head() == lived.head()
        assert other.view(LINE) == lived.view(LINE)
        wanted = RolloutFilter()
        assert list(other.rollouts(wanted)) == list(lived.rollouts(wanted))
        assert verify(other).ok
    with Ledger(empty) as reopened:
        assert reopened.ledger_id == lived.ledger_id
        claim = reopened.open_run("r1", take_over=True)
        assert reopened.reserve(claim).version == 9
        assert verify(reopened).ok


def test_a_replica_that_does_not_come_along_can_be_declared_lost(lived: Ledger, empty: str) -> None:
    joined = [row for row in lived.replicas(LINE) if row.state == "joined"]
    assert joined
    with Ledger(empty) as other:
        import_into(other, export(lived))
        assert other.heartbeats(LINE) == {row.replica: (row.generation, 0) for row in joined}
        first = joined[0]
        assert other.declare_lost(
            LINE, first.replica, generation=first.generation, counter=0, reason="still"
        )


def test_importing_into_a_ledger_with_events_is_refused(lived: Ledger) -> None:
    with pytest.raises(Refused, match="not empty"):
        import_into(lived, export(lived))


def changed(lines: list[str], number: int, **columns: object) -> list[str]:
    """The export with columns of one event changed (by position in the event)."""
    value = json.loads(lines[number])
    for position, content in columns.items():
        value["event"][int(position[1:])] = content
    return [*lines[:number], json.dumps(value), *lines[number + 1 :]]


def test_a_broken_export_leaves_the_ledger_empty(lived: Ledger, empty: str) -> None:
    lines = list(export(lived))
    cases = [
        (changed(lines, 5, _6="someone else"), Corrupted, "event 5"),
        ([*lines[:5], *lines[6:]], Corrupted, "event 6"),
        (lines[:10], Corrupted, "ends at event 9"),
        ([], Refused, "not an export"),
        (["{}"], Refused, "not an export"),
        ([lines[0].replace("policyline-ledger/1", "other/9"), *lines[1:]], Refused, "other/9"),
        ([*lines[:3], "nonsense"], Refused, "line 4"),
        ([*lines[:3], '{"event": [1, 2]}'], Refused, "line 4"),
    ]
    with Ledger(empty) as other:
        for broken, kind, expected in cases:
            with pytest.raises(kind, match=expected):
                import_into(other, broken)
            assert other.head()[0] == 0
            assert other.runs() == []
        assert import_into(other, lines) == lived.head()[0]


def test_projections_can_be_rebuilt_from_the_events(lived: Ledger, ledger_url: str) -> None:
    before = lived.view(LINE)
    head = lived.head()
    run_sql(
        ledger_url,
        "UPDATE lines SET current = 1",
        "DELETE FROM residency WHERE version = 3",
        "UPDATE versions SET reason = 'forged'",
        "DELETE FROM checkpoints",
    )
    assert not verify(lived).ok
    assert repair_projections(lived) == head[0]
    assert verify(lived).ok
    assert lived.view(LINE) == before
    assert lived.head() == head
    assert as_of(lived, LINE, head[0]).current == before.current
