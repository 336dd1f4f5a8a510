"""As-of, rollouts, diff and the like: what auditors ask."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from policyline.ledger import EngineFacts, Ledger, RunSettings, checkpoint
from policyline.ledger.append import unit_of_work
from policyline.ledger.db import database
from policyline.ledger.errors import Conflict, InvalidTime, NotFound, Refused, StaleEpoch
from policyline.ledger.read.as_of import as_of, parse_time, seq_at
from policyline.ledger.read.audit import audit
from policyline.ledger.read.replay import state_at
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import NewRollout, RolloutFilter
from policyline.ledger.rows import LineRow
from tests.ledger_builders import FACTS, LINE, acknowledge, publish

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def live(ledger: Ledger, rounds: int) -> None:
    """Publish, ack on two replicas, evict, restart one now and then."""
    claim = ledger.open_run("r1")
    r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    incarnation = "1000.5"
    for number in range(1, rounds + 1):
        manifest = publish(ledger, claim)
        acknowledge(ledger, r0, manifest)
        if number % 3 == 0:
            incarnation = f"{2000 + number}.0"
            ledger.change_incarnation(r1, EngineFacts(incarnation, FACTS.build, 6))
        acknowledge(ledger, r1, manifest, incarnation=incarnation)
        if number > 5:
            old = ledger.version(LINE, number - 5)
            ledger.evicted(r0, number - 5, digest=old.digest or "", reason="outside")


@pytest.mark.parametrize("every", [7, 1000])
def test_as_of_equals_the_replayed_state_at_every_event(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    for module in (checkpoint, unit_of_work):
        monkeypatch.setattr(module, "CHECKPOINT_EVERY", every)
    live(ledger, 8)
    head = ledger.head()[0]
    noted = {ledger.checkpoint_before(LINE, seq)[0] for seq in range(1, head + 1)}
    assert (len(noted) > 3) == (every == 7)
    for seq in range(1, head + 1):
        there = as_of(ledger, LINE, seq)
        state = state_at(ledger, LINE, seq)
        served: dict[str, list[int]] = {}
        for found in there.served:
            served.setdefault(found.replica, []).append(found.version)
            assert found.digest == ledger.version(LINE, found.version).digest
        assert served == {name: list(v) for name, v in state.serving.items() if v}
        assert (there.current, there.candidate) == (state.current, state.candidate)


def test_as_of_a_time_is_the_last_event_until_then(ledger_url: str) -> None:
    times = iter(NOON + timedelta(minutes=n) for n in range(1000))
    with Ledger(ledger_url, clock=lambda: next(times)) as ledger:
        live(ledger, 2)
        events = list(ledger.events())
        third = datetime.fromisoformat(events[2].recorded_at)
        assert seq_at(ledger, events[2].recorded_at, NOON) == 3
        assert seq_at(ledger, (third + timedelta(seconds=1)).isoformat(), NOON) == 3
        assert seq_at(ledger, "23:59", NOON) == len(events)
        with pytest.raises(NotFound, match="before"):
            seq_at(ledger, "2020-01-01", NOON)
    with Ledger(ledger_url) as ledger, pytest.raises(NotFound, match="events 1 to"):
        as_of(ledger, LINE, 10_000)


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00.000000+00:00"),
        ("2026-01-31 13:00:00+01:00", "2026-01-31T12:00:00.000000+00:00"),
        ("2026-01-31", "2026-01-31T00:00:00.000000+00:00"),
        ("08:30", "2026-01-01T08:30:00.000000+00:00"),
    ],
)
def test_times_may_be_written_as_people_do(moment: str, expected: str) -> None:
    assert parse_time(moment, NOON) == expected


@pytest.mark.parametrize("moment", ["", "yesterday", "12:99", "2026-13-01", "1e9x"])
def test_what_is_no_time_is_refused_with_examples(moment: str) -> None:
    with pytest.raises(InvalidTime, match="2026-01-31T12:00:00Z"):
        parse_time(moment, NOON)


def rollout(number: int, version: int, replica: str = "r0") -> NewRollout:
    return NewRollout(
        request=f"req-{number}",
        run="r1",
        version=version,
        replica=replica,
        asked_name=f"trl-policy-v{version}",
        status=200,
        started_at=f"2026-01-01T12:00:{number:02d}.000000+00:00",
        completion_tokens=7,
        episode=f"e{number // 2}",
    )


def test_rollouts_are_recorded_once_with_the_hash_of_their_batch(ledger: Ledger) -> None:
    live(ledger, 2)
    batch = [rollout(1, 1), rollout(2, 2), rollout(3, 2, "r1")]
    event = ledger.record_rollouts(LINE, "b1", batch)
    assert event is not None
    assert (event.data["count"], event.data["versions"]) == (3, [1, 2])
    head = ledger.head()
    assert ledger.record_rollouts(LINE, "b1", batch) == event
    assert ledger.head() == head
    with pytest.raises(Conflict):
        ledger.record_rollouts(LINE, "b1", batch[:2])
    assert ledger.record_rollouts(LINE, "b2", []) is None
    found = list(ledger.rollouts(RolloutFilter(line=LINE)))
    assert [(r.request, r.staleness) for r in found] == [("req-1", 1), ("req-2", 0), ("req-3", 0)]
    assert audit(ledger, LINE, 2).rollouts == {"r0": 1, "r1": 1}
    assert verify(ledger).ok


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (RolloutFilter(), [1, 2, 3, 4]),
        (RolloutFilter(version=2), [1, 2, 3]),
        (RolloutFilter(replica="r1"), [3]),
        (RolloutFilter(request="req-4"), [4]),
        (RolloutFilter(min_staleness=1), [1, 2, 3]),
        (RolloutFilter(since="2026-01-01T12:00:02", until="2026-01-01T12:00:04"), [2, 3]),
        (RolloutFilter(episode="e1"), [2, 3]),
        (RolloutFilter(limit=2), [1, 2]),
        (RolloutFilter(run="nope"), []),
    ],
)
def test_rollouts_can_be_filtered(
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    wanted: RolloutFilter,
    expected: list[int],
) -> None:
    monkeypatch.setattr(database, "PAGE_ROWS", 2)
    live(ledger, 3)
    ledger.record_rollouts(
        LINE, "b1", [rollout(1, 2), rollout(2, 2), rollout(3, 2, "r1"), rollout(4, 3)]
    )
    ledger.record_rollouts(LINE, "b2", [])
    numbers = [int(r.request[4:]) for r in ledger.rollouts(wanted)]
    assert numbers == expected


def test_a_digest_finds_its_versions(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    one, _, again = (publish(ledger, claim, text) for text in ("a", "b", "a"))
    assert [v.version for v in ledger.find_version(one.digest)] == [1, 3]
    assert [v.version for v in ledger.find_version(again.digest[:12])] == [1, 3]
    assert ledger.find_version("zz") == []


def test_rolling_back_withdraws_what_came_later_and_fences_the_publisher(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    for _ in range(4):
        acknowledge(ledger, member, publish(ledger, claim))
    publish(ledger, claim)
    assert ledger.roll_back(LINE, 2, "reward collapsed") == (3, 4, 5)
    view = ledger.view(LINE)
    assert [(d.version, d.role) for d in view.desired] == [(2, "current"), (1, "window")]
    assert view.candidate is None
    with pytest.raises(StaleEpoch, match=r"rolled back to trl-policy-v2.*reward collapsed"):
        ledger.reserve(claim)
    with pytest.raises(Refused, match="current already"):
        ledger.roll_back(LINE, 2, "again")
    with pytest.raises(Refused, match="withdrawn"):
        ledger.roll_back(LINE, 4, "forward")
    fresh = ledger.open_run("r1")
    sixth = publish(ledger, fresh)
    assert sixth.version == 6
    acknowledge(ledger, member, sixth)
    assert [d.version for d in ledger.view(LINE).desired] == [6, 2, 1]
    assert verify(ledger).ok


def test_a_view_tells_of_other_versions_all_but_their_manifests(ledger: Ledger) -> None:
    claim = ledger.open_run("r1", settings=RunSettings(max_staleness=0))
    member = ledger.join(LINE, "r0", FACTS)
    for _ in range(2):
        acknowledge(ledger, member, publish(ledger, claim))
    view = ledger.view(LINE, also=[1, 2])
    whole = ledger.version(LINE, 1)
    assert whole.manifest
    assert view.others == {1: dataclasses.replace(whole, manifest=None)}
    assert [d.row for d in view.desired] == [ledger.version(LINE, 2)]


def test_only_a_version_of_the_open_run_that_was_current_can_be_rolled_back_to(
    ledger: Ledger,
) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    acknowledge(ledger, member, publish(ledger, claim))
    publish(ledger, claim)
    with pytest.raises(Refused, match="never current"):
        ledger.roll_back(LINE, 2, "x")
    with pytest.raises(NotFound):
        ledger.roll_back(LINE, 9, "x")
    ledger.release(claim)
    ledger.open_run("r2")
    with pytest.raises(Refused, match="--parent-run r1"):
        ledger.roll_back(LINE, 1, "x")


def test_pause_is_a_desired_state_and_said_once(ledger: Ledger) -> None:
    with pytest.raises(NotFound):
        ledger.pause(LINE, "maintenance")
    ledger.open_run("r1")
    assert ledger.pause(LINE, "maintenance")
    assert not ledger.pause(LINE, "again")
    assert ledger.view(LINE).line.paused
    assert ledger.resume(LINE)
    assert not ledger.resume(LINE)
    assert not ledger.view(LINE).line.paused


def test_checkpoints_hold_plain_rows() -> None:
    row = LineRow(line=LINE, current=3)
    (back,) = checkpoint.rows_of(checkpoint.checkpoint_text(row, [], []))
    assert dataclasses.asdict(back) == dataclasses.asdict(row)
