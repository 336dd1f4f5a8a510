"""All projections at one event, streamed, for comparison with what the events add up to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.db import schema
from policyline.ledger.db.statements import R
from policyline.ledger.events import VERSION_ACKED, VERSION_PUBLISHED
from policyline.ledger.names import policy_name
from policyline.ledger.read.rollout_queries import last_rollout_id

PAGE_ROWS: Final = 500


class ProjectionSnapshot:
    """The projections in one read transaction."""

    def __init__(self, connection: Connection, head: tuple[int, str]) -> None:
        self._connection = connection
        self.head = head
        """(seq, hash) of the last event."""

    def head_time(self) -> str:
        """When the last event was recorded, according to the head; UTC, ISO 8601."""
        found: str = self._connection.execute(sa.select(schema.head.c.recorded_at)).scalar_one()
        return found

    def has_events_after(self, seq: int) -> bool:
        """Whether the chain goes on."""
        query = sa.select(sa.func.max(schema.events.c.seq))
        last = self._connection.execute(query).scalar()
        return last is not None and last > seq

    def last_rollout(self) -> int:
        """The id of the last rollout; 0 without one."""
        return last_rollout_id(self._connection)

    def orphaned_phases(self, most: int) -> list[tuple[int, int, str]]:
        """(id, seq, policy name) of phases, at most so many, that no event can have brought.

        They are outside the fold: all that is known is that each came with an event about its
        version.
        """
        phase, event, version = schema.phases.c, schema.events.c, schema.versions.c
        same_event = (
            (event.seq == phase.seq)
            & (event.line == phase.line)
            & (event.version == phase.version)
            & event.kind.in_((VERSION_PUBLISHED, VERSION_ACKED))
        )
        same_version = (
            (version.line == phase.line)
            & (version.version == phase.version)
            & (version.run == phase.run)
        )
        query = (
            sa.select(phase.id, phase.seq, phase.line, phase.version)
            .select_from(
                schema.phases.outerjoin(schema.events, same_event).outerjoin(
                    schema.versions, same_version
                )
            )
            .where(event.seq.is_(None) | version.version.is_(None))
            .order_by(phase.id)
            .limit(most)
        )
        rows = self._connection.execute(query)
        return [(row.id, row.seq, policy_name(row.line, row.version)) for row in rows]

    def pages(self, table: type[R]) -> Iterator[list[R]]:
        """Every row of a projection, streamed by the page."""
        query = sa.select(schema.PROJECTIONS[table])
        result = self._connection.execution_options(yield_per=PAGE_ROWS).execute(query)
        for page in result.partitions():
            yield [table(*row) for row in page]
