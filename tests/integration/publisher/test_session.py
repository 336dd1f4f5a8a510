"""What a trainer's session publishes, and what it reports of the replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher.settings import PublishTo
from policyline.publisher.training.rank0 import foreign_adapters
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
