"""Records each answer in the spool before its last byte is sent."""

from __future__ import annotations

import logging
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Final

from policyline.router.metrics import Metrics
from policyline.router.request import Attempt
from policyline.router.rollouts.spool import Spool

log = logging.getLogger(__name__)

TAIL_BYTES: Final = 4096
"""Bytes of an answer's end that hold its `usage`: in vLLM 0.32 only short fields follow it."""
_USAGE = re.compile(rb'"usage":\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')


class Audit:
    """Records rollouts.

    Args:
        spool: that they are appended to.
        metrics: count and time them.
    """

    def __init__(self, spool: Spool, metrics: Metrics) -> None:
        self._spool = spool
        self._metrics = metrics

    def record(self, attempt: Attempt, status: int, tail: bytes) -> None:
        """Record an attempt once: further calls do nothing.

        Args:
            attempt: that ends now.
            status: of the answer.
            tail: last bytes of its body, with the token counts.

        Raises:
            SpoolUnusable: it cannot be recorded, so the answer must not be completed.
        """
        if attempt.recorded:
            return
        call, now = attempt.call, time.monotonic()
        queue_s, first_s = attempt.sent_s - call.arrived_s, attempt.first_s or now
        arrived = datetime.now(UTC) - timedelta(seconds=now - call.arrived_s)
        prompt_tokens, completion_tokens = token_counts(tail)
        self._spool.append(
            (
                call.id,
                attempt.serve.run,
                call.version,
                attempt.replica,
                call.asked_name,
                status,
                arrived.isoformat(timespec="microseconds"),
                round(queue_s, 6),
                round(first_s - attempt.sent_s, 6),
                round(now - first_s, 6),
                prompt_tokens,
                completion_tokens,
                call.episode,
            )
        )
        attempt.recorded = True
        log.debug(
            "%s, which is %s, by %s: %d",
            call.asked_name,
            attempt.serve.name,
            attempt.replica,
            status,
            extra={"event": "answered", "version": call.version, "request": call.id},
        )
        metrics = self._metrics
        metrics.recorded.inc()
        metrics.answers.labels(status).inc()
        metrics.queue_s.observe(queue_s)
        metrics.answer_s.observe(now - attempt.sent_s)


def token_counts(tail: bytes) -> tuple[int, int]:
    """Prompt and completion tokens of an answer; 0 where its `usage` lacks them.

    A quote inside a JSON string is escaped, so generated text cannot be taken for the field.
    """
    at = tail.rfind(b'"usage":')
    found = _USAGE.match(tail, at) if at >= 0 else None
    if found is None:
        return 0, 0
    return _number(_PROMPT, found[1]), _number(_COMPLETION, found[1])


def _number(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0
