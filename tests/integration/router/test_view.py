"""The view of the ledger: what breaks its reading, and that it goes on afterwards."""

from __future__ import annotations

import threading

import pytest

from policyline.ledger.errors import LedgerUnavailable
from policyline.router import view
from tests.integration.router.site import Site


async def test_another_ledger_at_the_same_url_is_not_believed(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.running(poll_interval_s=0.05) as (router, client):
        site.ledger.replaced = True
        await site.until(lambda: not router.view_cache.ledger_up)
        served = await client.complete(version)
        status = (await client.get("/status")).content
        unknown = await client.complete(version + 1)
        site.ledger.replaced = False
        await site.until(lambda: router.view_cache.ledger_up)

    assert served.status == 200
    assert status["problems"] == ["the ledger cannot be reached"]
    assert status["ledger"]["id"] != "another"
    assert (unknown.status, unknown.error) == (503, "ledger_unreachable")
    assert "ledger_replaced" in [getattr(record, "event", "") for record in caplog.records]


async def test_a_bug_in_a_read_does_not_end_the_following(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)

    async with site.running(poll_interval_s=0.05) as (router, _):
        site.ledger.failure = RuntimeError("a bug")
        await site.until(lambda: "view_failed" in [getattr(r, "event", "") for r in caplog.records])
        site.ledger.failure = None
        version = await site.publish_and_serve(2)
        await site.until(lambda: router.view_cache.gate.current == version)


async def test_a_read_that_hangs_counts_as_an_unreachable_ledger(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    monkeypatch.setattr(view, "_READ_TIMEOUT_S", 0.2)

    async with site.running(poll_interval_s=0.05) as (router, client):
        site.ledger.hangs = released = threading.Event()
        unknown = await client.complete(version + 1)
        served = await client.complete(version)
        await site.until(lambda: not router.view_cache.ledger_up)
        site.ledger.hangs = None
        released.set()
        await site.until(lambda: router.view_cache.ledger_up)
        assert (await client.complete(version + 1)).status == 404

    assert (unknown.status, unknown.error) == (503, "ledger_unreachable")
    assert served.status == 200


async def test_a_router_that_cannot_read_the_ledger_does_not_start(site: Site) -> None:
    site.ledger.unreachable = True
    with pytest.raises(LedgerUnavailable):
        async with site.router():
            pass
    site.ledger.unreachable = False

    async with site.router() as client:  # the spool is free again
        assert (await client.get("/health")).status == 503
