"""A result row of a whole table is the arguments of its dataclass, in order."""

from __future__ import annotations

from dataclasses import fields

import pytest

from policyline.ledger.db import schema
from policyline.ledger.events import Event
from policyline.ledger.rows import ROW_TYPES, Row


@pytest.mark.parametrize("table", ROW_TYPES)
def test_columns_stand_in_the_order_of_the_rows_fields(table: type[Row]) -> None:
    columns = [column.name for column in schema.PROJECTIONS[table].columns]
    assert columns == [field.name for field in fields(table)]


def test_columns_of_events_stand_in_the_order_of_its_fields() -> None:
    assert [column.name for column in schema.events.columns] == list(Event.__slots__)
