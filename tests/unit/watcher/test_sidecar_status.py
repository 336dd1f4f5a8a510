"""When a replica is ready, and what it tells about itself."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from policyline.watcher.core.model import Desired, Known, Unknown
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.status import SidecarStatus, StatusPages
from tests.unit.watcher.builders import desired, known, version

SERVED = version(1, "current", "acked")


def status(
    what: Desired | Unknown | None = None, observed: Known | Unknown | None = None
) -> SidecarStatus:
    return SidecarStatus(
        "trl-policy",
        "r0",
        generation=1,
        desired=desired(SERVED) if what is None else what,
        observed=known([SERVED]) if observed is None else observed,
    )


def test_a_replica_that_serves_what_is_desired_is_ready() -> None:
    assert status().why_not_ready() == ""


@pytest.mark.parametrize("reported", ["fetched", "failed", "evicted", None])
def test_a_missing_ack_of_the_window_makes_it_unready(reported: str | None) -> None:
    missing = version(2, "window", reported)  # type: ignore[arg-type] # literals above

    assert status(desired(SERVED, missing)).why_not_ready() == "not served yet: trl-policy-v2"


def test_candidate_and_rejected_versions_do_not_make_it_unready() -> None:
    """I9: a bad version must not take the replica out of service."""
    candidate, rejected = version(2, "candidate"), version(3, "window", "rejected")

    assert status(desired(SERVED, candidate, rejected)).why_not_ready() == ""


def test_an_ack_of_a_former_incarnation_makes_it_unready() -> None:
    assert "trl-policy-v1" in status(desired(SERVED, incarnation="2.0")).why_not_ready()


def test_what_is_unknown_is_not_ready() -> None:
    assert status(what=Unknown("locked")).why_not_ready() == "ledger: locked"
    assert status(observed=Unknown("away")).why_not_ready() == "engine: away"


class TestHttp:
    def get(self, path: str, shown: SidecarStatus, now: float = 1.0) -> web.Response:
        return StatusPages(shown, SidecarMetrics(), lambda: now).answer("GET", path)

    def test_readyz_says_why_not(self) -> None:
        shown = status()
        assert self.get("/readyz", shown).status == 200
        shown.leaving = True
        answer = self.get("/readyz", shown)
        assert (answer.status, answer.text) == (503, "leaving")

    def test_healthz_fails_when_the_loop_stands(self) -> None:
        assert self.get("/healthz", status()).status == 200
        assert self.get("/healthz", status(), now=1e4).status == 503

    def test_status_is_complete_while_all_is_unknown(self) -> None:
        shown = SidecarStatus("trl-policy", "r0")

        status = json.loads(self.get("/status", shown).text or "")

        assert status["desired"] == {"unknown": "not read yet"}
        assert status["observed"] == {"unknown": "not seen yet", "gone": False}
        assert (status["plan"], status["next_wake_s"]) == ([], None)

    def test_metrics_measure_residency_and_lag(self) -> None:
        metrics = SidecarMetrics()
        current, old = version(5, "current"), version(3, "window", "acked")
        metrics.measure(desired(current, old), known([old]))

        answer = StatusPages(status(), metrics, lambda: 0.0).answer("GET", "/metrics")
        text = str(answer.body)

        assert "policyline_resident_versions 1.0" in text
        assert "policyline_lag_versions 2.0" in text

    def test_what_is_not_served_is_refused(self) -> None:
        pages = StatusPages(status(), SidecarMetrics(), lambda: 1.0)

        assert pages.answer("GET", "/nothing").status == 404
        assert pages.answer("POST", "/status").status == 405
        assert pages.answer("GET", "/status/").status == 200
