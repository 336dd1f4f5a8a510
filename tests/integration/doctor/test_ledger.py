"""The ledger measured, on both databases: what is written is gone and no event was appended."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from policyline.doctor import ledger as measured
from policyline.doctor.ledger import examine_ledger, ledger_lines
from policyline.ledger import Ledger
from policyline.ledger.db import connect as connections
from policyline.ledger.db import schema
from policyline.ledger.read.verify import verify
from policyline.ledger.roundtrip import RoundTrip, round_trip
from tests.integration.ledger import conftest as ledgers
from tests.ledger_builders import publish

postgres = ledgers.postgres
sqlite_url = ledgers.sqlite_url
postgres_url = ledgers.postgres_url
ledger_kind = ledgers.ledger_kind
ledger_url = ledgers.ledger_url

LINE = "trl-policy"


def test_a_round_trip_leaves_no_trace(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger:
        publish(ledger, ledger.open_run("run"))
        before = ledger.head()

        trip = round_trip(ledger, timeout_s=20.0)

        assert ledger.head() == before
        assert verify(ledger).ok
        with ledger.exclusive() as connection:
            rows = connection.execute(sa.select(schema.heartbeats)).all()
    assert rows == []
    assert 0 < trip.write_s < 20
    assert trip.wake_s is not None


def test_everything_is_seen(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger:
        manifest = publish(ledger, ledger.open_run("run"))

    found = examine_ledger(ledger_url, LINE, {1, 7})

    assert {line.status for line in ledger_lines(found)} == {"pass"}
    assert found.digests == {1: manifest.digest}
    assert isinstance(found.round_trip, RoundTrip)


def test_a_lock_that_somebody_holds_is_told(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.2)
    with Ledger(sqlite_url) as holder, holder.exclusive() as connection:
        connection.execute(sa.text("SELECT 1"))  # takes the lock
        found = examine_ledger(sqlite_url, LINE, ())

    lines = {line.name: line for line in ledger_lines(found)}
    assert (lines["ledger.write"].status, lines["ledger.write"].unreachable) == ("fail", True)


def test_a_signal_file_that_cannot_be_made_is_a_warning(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "SIGNAL_S", 0.1)
    Path(f"{sqlite_url}.signal").unlink(missing_ok=True)
    Path(f"{sqlite_url}.signal").symlink_to("/dev/null/nothing")

    found = examine_ledger(sqlite_url, LINE, ())

    lines = {line.name: line.status for line in ledger_lines(found)}
    assert (lines["ledger.write"], lines["ledger.signal"]) == ("pass", "warn")


@pytest.mark.parametrize(
    ("url", "name", "unreachable", "hint"),
    [
        ("{root}/none.db", "ledger.reachable", True, "policyline ledger upgrade"),
        ("{root}/empty.db", "ledger.schema", False, "policyline ledger upgrade"),
        ("mysql://x", "ledger.reachable", False, "postgresql://"),
        ("postgresql://u:secret@127.0.0.1:1/x", "ledger.reachable", True, "running"),
    ],
)
def test_what_cannot_be_opened(
    tmp_path: Path, url: str, name: str, unreachable: bool, hint: str
) -> None:
    (tmp_path / "empty.db").touch()

    lines = list(ledger_lines(examine_ledger(url.replace("{root}", str(tmp_path)), LINE, ())))

    last = lines[-1]
    assert (last.status, last.name, last.unreachable) == ("fail", name, unreachable)
    assert hint in last.remedy
    assert not any("secret" in f"{line.value}{line.remedy}" for line in lines)
