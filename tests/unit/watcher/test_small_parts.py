"""Settings, probe, threads and what an error means."""

from __future__ import annotations

from pathlib import Path

import pytest

from policyline.errors import SettingsInvalid
from policyline.ledger.errors import InvalidName
from policyline.ledger.probe import PROBE_TOKENS, largest_difference
from policyline.watcher.observe import cause_of, is_gone
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.vllm.errors import EngineDead, EngineTimeout, EngineUnreachable


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("poll_interval_s", 0.0, "poll_interval_s 0.0"),
        ("linger_s", -1.0, "linger_s -1.0"),
        ("ttl_s", 3.9, "raise --ttl"),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, value: float, text: str) -> None:
    with pytest.raises(SettingsInvalid, match=text):
        SidecarSettings(replica="r0", cache=Path(), **{field: value})  # type: ignore[arg-type] # floats


def test_names_are_checked() -> None:
    with pytest.raises(InvalidName):
        SidecarSettings(replica="a b", cache=Path())


def test_the_largest_difference_counts() -> None:
    assert largest_difference([-1.0, -2.0], "[-1.0,-2.5]") == 0.5
    assert largest_difference([-1.0], "[-1.0,-2.5]") == float("inf")
    assert largest_difference([float("nan")], "[-1.0]") != 0.0


def test_the_probe_fits_small_vocabularies() -> None:
    assert 0 <= min(PROBE_TOKENS) <= max(PROBE_TOKENS) < 256


def raised(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


def test_gone_is_only_who_refuses_or_says_so() -> None:
    refused = raised(OSError("all attempts failed"), ConnectionRefusedError())

    assert is_gone(raised(EngineUnreachable("x"), refused))
    assert is_gone(raised(EngineUnreachable("x"), ExceptionGroup("g", [refused])))
    assert is_gone(EngineDead("x"))
    assert not is_gone(EngineTimeout("x"))
    assert not is_gone(raised(EngineUnreachable("x"), ConnectionResetError()))
    assert not is_gone(None)


def test_a_cause_names_kind_and_remedy() -> None:
    assert cause_of(EngineUnreachable("no route")).startswith("EngineUnreachable: no route; check")
    assert cause_of(ValueError("v")) == "ValueError: v"
