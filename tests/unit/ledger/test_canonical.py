"""Canonical JSON: one text for one value, and only values that JSON has."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.ledger.canonical import canonical, parse_object

PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)


@given(st.lists(PLAIN.filter(lambda v: v not in {float("inf"), float("-inf")})))
def test_a_list_is_written_without_white_space(values: list[object]) -> None:
    assert canonical(values) == json.dumps(values, separators=(",", ":"), ensure_ascii=False)


class Number(int):
    """A number of another type, as a driver might give one."""


def test_values_of_other_types_are_written_as_their_kind() -> None:
    assert canonical([Number(7), {"b": 1, "a": [2]}]) == '[7,{"a":[2],"b":1}]'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_holds_no_number_that_json_has_not(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical([value])


@given(st.dictionaries(st.text(), PLAIN), st.sampled_from(["", " ", "\n"]))
def test_objects_read_back_whatever_white_space_is_around_them(
    value: dict[str, object], space: str
) -> None:
    assert parse_object(f"{space}{json.dumps(value)}{space}") == value


@pytest.mark.parametrize("text", ["", "{", '{"a":1}x', '{"a":1}{}', "[1]", "7", "x{}"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_object(text)
