"""Names: one canonical spelling per version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.ledger.errors import InvalidName
from policyline.ledger.names import check_label, check_line, parse_policy_name, policy_name


@given(st.integers(min_value=1, max_value=10**17))
def test_a_name_reads_back_as_its_version(version: int) -> None:
    assert parse_policy_name("trl-policy", policy_name("trl-policy", version)) == version


@pytest.mark.parametrize(
    "name",
    [
        "trl-policy-v0",
        "trl-policy-v01",
        "trl-policy-v-1",
        "trl-policy-v1 ",
        "trl-policy-v1\n",
        "trl-policy-v",
        "trl-policy-v\uff11",
        "trl-policy-vx",
        "other-v1",
        "trl-policy",
        "",
    ],
)
def test_other_spellings_are_not_names_of_the_line(name: str) -> None:
    assert parse_policy_name("trl-policy", name) is None


@pytest.mark.parametrize("line", ["", "A", "a/b", "..", "a b", "-a", "a-", "a" * 64, "a\n"])
def test_unusable_lines_are_refused_by_name(line: str) -> None:
    with pytest.raises(InvalidName, match="line"):
        check_line(line)


@pytest.mark.parametrize("label", ["", "a/b", "..", ".a", "a\x00", "a b", "a" * 129])
def test_unusable_labels_are_refused_by_name(label: str) -> None:
    with pytest.raises(InvalidName, match="run"):
        check_label("run", label)


def test_usable_names_pass_unchanged() -> None:
    assert check_line("trl-policy") == "trl-policy"
    assert check_label("run", "GRPO_7.b-1") == "GRPO_7.b-1"
