"""Which version a trainer's own number means."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policyline.trainers.names import TRAINER_NAME, TRAINER_SESSION, TrainerNames


def load(names: TrainerNames, version: int, name: str, digest: str) -> int:
    """What a load does: a retry gives what it was, anything else is the next version."""
    again = names.retried(name, digest)
    if again is not None:
        return again.version
    session = names.session_for(name)
    names.take(version, digest, {TRAINER_NAME: name, TRAINER_SESSION: session})
    return version


def test_names_of_one_session_are_their_versions() -> None:
    names = TrainerNames()

    assert [load(names, 7 + n, f"v{n}", f"d{n}") for n in range(1, 4)] == [8, 9, 10]
    assert {n: m.version for n, m in names.versions.items()} == {"v1": 8, "v2": 9, "v3": 10}
    assert names.session == 1


def test_the_last_load_again_is_a_retry() -> None:
    names = TrainerNames()
    load(names, 1, "v1", "d1")

    assert load(names, 2, "v1", "d1") == 1


def test_other_bytes_under_a_used_name_are_a_new_session() -> None:
    names = TrainerNames()
    for number in (1, 2, 3):
        load(names, number, f"v{number}", f"d{number}")

    assert load(names, 4, "v1", "other") == 4
    assert names.session == 2
    assert names.versions["v1"].version == 4
    assert names.versions["v3"].version == 3, "until the new session uses the name"


def test_the_first_version_again_is_no_retry_once_others_followed() -> None:
    """A run from scratch with the same seed begins with the same bytes."""
    names = TrainerNames()
    load(names, 1, "v1", "d1")
    load(names, 2, "v2", "d2")

    assert load(names, 3, "v1", "d1") == 3
    assert names.session == 2


def test_a_resume_goes_on_from_its_checkpoint() -> None:
    names = TrainerNames()
    for number in range(1, 11):
        load(names, number, f"v{number}", f"d{number}")

    assert [load(names, 11 + n, f"v{8 + n}", f"e{n}") for n in range(5)] == [11, 12, 13, 14, 15]
    assert names.session == 2
    assert names.versions["v8"].version == 11
    assert names.versions["v7"].version == 7


def test_what_no_trainer_named_leaves_no_trace() -> None:
    names = TrainerNames()
    names.take(1, "d", {})
    names.take(2, "d", {TRAINER_NAME: 3, TRAINER_SESSION: "x"})

    assert names.versions == {}


@given(
    loads=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=40),
    folded_at=st.integers(0, 40),
)
def test_a_restarted_router_goes_on_where_the_other_was(
    loads: list[tuple[int, int]], folded_at: int
) -> None:
    names = TrainerNames()
    published: list[tuple[int, str, dict[str, Any]]] = [(0, "", {"another": "name"})]
    for step, (number, digest) in enumerate(loads):
        if step == folded_at:
            names = TrainerNames()
            for version, content, metadata in published:
                names.take(version, content, metadata)
        name, content = f"v{number}", f"d{digest}"
        version = len(published)
        if names.retried(name, content) is None:
            session = names.session_for(name)
            metadata = {TRAINER_NAME: name, TRAINER_SESSION: session}
            names.take(version, content, metadata)
            published.append((version, content, metadata))
        assert names.versions[name].digest == content
    again = TrainerNames()
    for version, content, metadata in published:
        again.take(version, content, metadata)
    assert again == names
