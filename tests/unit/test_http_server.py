"""The HTTP server's log: everything but what a malformed request held."""

from __future__ import annotations

import logging

import pytest
from aiohttp.http_exceptions import BadStatusLine

from policyline.http_server import _logger


def test_other_records_are_logged_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logger = _logger()

    logger.info("plain %s", "record")
    logger.error("failed", exc_info=ValueError("a bug"))

    assert [r.getMessage() for r in caplog.records] == ["plain record", "failed"]
    assert "a bug" in caplog.text


def test_malformed_http_is_one_line_without_its_content(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logger = _logger()

    logger.error(
        "Error handling request from %s",
        "127.0.0.1",
        exc_info=BadStatusLine("authorization: secret"),
    )

    (record,) = caplog.records
    assert record.getMessage() == (
        "Error handling request from 127.0.0.1: malformed HTTP (BadStatusLine)"
    )
    assert record.levelno == logging.INFO
    assert "secret" not in caplog.text


def test_malformed_http_is_dropped_where_info_is(caplog: pytest.LogCaptureFixture) -> None:
    logger = _logger()
    caplog.set_level(logging.WARNING, logger=logger.name)

    logger.error("Error handling request", exc_info=BadStatusLine("x"))

    assert caplog.records == []
