"""One note for each request that a replica was asked, in the spool before its last byte is out."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

from policyline.router.metrics import Metrics
from policyline.router.request import Passage
from policyline.router.rollouts.spool import Spool
from policyline.router.usage import usage

log = logging.getLogger(__name__)


class Audit:
    """Writes rollouts down.

    Args:
        spool: gets them.
        metrics: count and time them.
    """

    def __init__(self, spool: Spool, metrics: Metrics) -> None:
        self._spool = spool
        self._metrics = metrics

    def note(self, passage: Passage, status: int, tail: bytes) -> None:
        """Write one down; the first call for a passage that succeeds counts.

        Args:
            passage: that ends now.
            status: of the answer.
            tail: the end of its body, which tells the tokens.

        Raises:
            SpoolUnusable: it could not be written: the answer must not be completed.
        """
        if passage.noted:
            return
        call, now = passage.call, time.monotonic()
        queue_s, first_s = passage.sent_s - call.arrived_s, passage.first_s or now
        prompt_tokens, completion_tokens = usage(tail)
        self._spool.note(
            (
                call.id,
                passage.serve.run,
                call.version,
                passage.replica,
                call.asked_name,
                status,
                _utc(time.time() - (now - call.arrived_s)),
                round(queue_s, 6),
                round(first_s - passage.sent_s, 6),
                round(now - first_s, 6),
                prompt_tokens,
                completion_tokens,
                call.episode,
            )
        )
        passage.noted = True
        if log.isEnabledFor(logging.DEBUG):
            self._say(passage, status)
        metrics = self._metrics
        metrics.noted += 1
        metrics.answers[status] += 1
        metrics.queue_s.add(queue_s)
        metrics.answer_s.add(now - passage.sent_s)

    @staticmethod
    def _say(passage: Passage, status: int) -> None:
        call = passage.call
        log.debug(
            "%s, which is %s, by %s: %d",
            call.asked_name,
            passage.serve.name,
            passage.replica,
            status,
            extra={"event": "answered", "version": call.version, "request": call.id},
        )


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="microseconds")
