"""The ledger's reading side: typed answers, each from one consistent snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from policyline.ledger.read.event_queries import EventQueries
from policyline.ledger.read.projections import ProjectionSnapshot
from policyline.ledger.read.rollout_queries import RolloutQueries


class Queries(EventQueries, RolloutQueries):
    """Every question. Each method is one read transaction and returns frozen dataclasses."""

    @contextmanager
    def projections(self) -> Iterator[ProjectionSnapshot]:
        """All projections at one event, for comparison; streamed."""
        with self._reading() as connection:
            yield ProjectionSnapshot(connection, self._head(connection)[1:])
