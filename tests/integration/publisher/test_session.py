"""What a trainer's session publishes, and what it reports of the replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher.errors import CheckFailed, NotSupported, PublishingBlocked
from policyline.publisher.settings import PublishTo
from policyline.publisher.training.rank0 import Rank0Session, foreign_adapters
from policyline.publisher.training.session import Session
from tests.integration.publisher.workspace import RUN, Workspace, versions
from tests.unit.publisher.builders import write_adapter

FACTS = EngineFacts("1000.5", "build", 6)


@pytest.fixture
def session(workspace: Workspace) -> Iterator[Session]:
    """Without a base model to check against."""
    to = PublishTo(ledger=str(workspace.ledger), storage=str(workspace.root), run=RUN)
    staging = workspace.adapter.parent / "staging"
    opened = Session(to, max_staleness=4, base_model="tiny", staging=staging, resumed={})
    yield opened
    opened.close()


@pytest.mark.parametrize("scored", [True, False])
def test_a_version_is_published_without_the_reference_that_nobody_will_score(
    session: Session, ledger: Ledger, *, scored: bool
) -> None:
    reference: Future[list[float]] = Future()
    session.save(write_adapter, {"step": 3}, 0.0, reference)
    assert session.submit() == 0
    assert session.submit() is None  # it was submitted already
    if scored:
        reference.set_result([-1.0] * 15)
    else:
        reference.cancel()
    session.finish()

    manifest = json.loads(versions(ledger)[1].manifest or "")
    assert ("probe_reference" in manifest["metadata"]) == scored
    assert manifest["metadata"]["step"] == 3


def test_a_foreign_adapter_is_reported_until_its_vllm_restarts(
    session: Session, ledger: Ledger
) -> None:
    member = ledger.join(DEFAULT_LINE, "r0", FACTS)
    ledger.foreign_adapter_seen(member, "trl-policy-v1", "/other", "another path")

    assert list(foreign_adapters(ledger, DEFAULT_LINE, 1)) == ["r0"]
    assert foreign_adapters(ledger, DEFAULT_LINE, 2) == {}
    ledger.change_incarnation(member, EngineFacts("2000.5", "build", 6))
    assert foreign_adapters(ledger, DEFAULT_LINE, 1) == {}


def open_session(workspace: Workspace, *, max_staleness: int = 4, **changes: Any) -> Session:
    to = PublishTo(ledger=workspace.ledger, storage=str(workspace.root), run=RUN, **changes)
    staging = workspace.adapter.parent / "staging"
    return Session(to, max_staleness=max_staleness, base_model="tiny", staging=staging, resumed={})


def test_a_run_with_another_staleness_is_refused_before_it_is_claimed(
    session: Session, workspace: Workspace, ledger: Ledger
) -> None:
    session.close()
    epoch = ledger.run(RUN).epoch
    with pytest.raises(NotSupported, match="was opened with max_staleness 4, the trainer has 2"):
        open_session(workspace, max_staleness=2)
    assert ledger.run(RUN).epoch == epoch


def test_an_adapter_that_cannot_be_served_stops_the_next_sync_and_the_end(
    session: Session,
) -> None:
    session.save(lambda directory: write_adapter(directory, use_dora=True), {}, 0.0)
    session.submit()
    with pytest.raises(CheckFailed, match="DoRA"):
        session.finish()
    with pytest.raises(CheckFailed, match="DoRA"):
        session.raise_failure()


def test_a_storage_that_stays_away_ends_the_last_wait_with_its_cause(workspace: Workspace) -> None:
    session = open_session(workspace, ready_timeout_s=0.3)
    try:
        session.save(write_adapter, {}, 0.0)
        away = workspace.root.with_name("away")
        workspace.root.rename(away)
        session.submit()
        with pytest.raises(PublishingBlocked, match="the last version could not be published"):
            session.finish()
        away.rename(workspace.root)
    finally:
        session.close()


def test_a_mean_ratio_far_from_one_is_flagged_after_the_first_version(
    session: Session, ledger: Ledger
) -> None:
    for _ in range(2):
        session.save(write_adapter, {}, 0.0)
        session.logs.add({"ratio": 1.2})
        session.submit()
        session.finish()

    first, second = (json.loads(versions(ledger)[n].manifest or "") for n in (1, 2))
    assert "flag" not in first["metadata"]  # no version before it
    assert second["metadata"]["flag"] == "ratio 1.2000 after trl-policy-v1"
    assert second["metadata"]["parent_version"] == 1


class TestRouting:
    """Rollouts that go straight to a server, without a router."""

    def rank0(self, workspace: Workspace, **changes: Any) -> Rank0Session:
        return Rank0Session(
            PublishTo(ledger=workspace.ledger, storage=str(workspace.root), run=RUN, **changes),
            max_staleness=4,
            base_model="tiny",
            staging=workspace.adapter.parent / "staging",
            resumed={},
            on_published=lambda _version: None,
            on_current=lambda _version, _served: None,
        )

    def test_an_unknown_replica_is_refused(self, workspace: Workspace, ledger: Ledger) -> None:
        rank0 = self.rank0(workspace, servers={"r0": "http://a", "typo": "http://b"})
        try:
            ledger.join(DEFAULT_LINE, "r0", FACTS)
            with pytest.raises(NotSupported, match="servers names typo, joined are r0"):
                rank0.check_routing("http://router")
        finally:
            rank0.close()

    def test_one_of_several_servers_is_refused_as_the_only_one(
        self, workspace: Workspace, ledger: Ledger
    ) -> None:
        rank0 = self.rank0(workspace)
        try:
            ledger.join(DEFAULT_LINE, "r0", FACTS, url="http://a:8000")
            rank0.check_routing("http://a:8000/")
            ledger.join(DEFAULT_LINE, "r1", FACTS, url="http://b:8000")
            rank0.check_routing("http://router:9000")
            with pytest.raises(NotSupported, match=r"one of the line's 2 servers \(r0, r1\)"):
                rank0.check_routing("http://a:8000/")
        finally:
            rank0.close()
