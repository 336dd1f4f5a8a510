import io

import pytest
from rich.console import Console

from policyline.demo.checks import Check
from policyline.demo.progress import Progress
from policyline.demo.report import (
    Cell,
    Latency,
    Report,
    VersionLine,
    latency,
    phase_latencies,
    quantile,
    show,
)
from policyline.ledger.read.rollout_queries import PhaseRow

DAY = "2026-01-02T03:04:{:09.6f}+00:00"


def report(*, ok: bool = True) -> Report:
    """Two versions on one replica: the first evicted, the second skipped."""
    return Report(
        engine="sim",
        replicas=("r0",),
        max_staleness=0,
        duration_s=3.25,
        workdir=None,
        versions=(
            VersionLine(
                1,
                "trl-policy-v1",
                "ab" * 32,
                "published",
                "out_of_window",
                DAY.format(1),
                {"r0": Cell("evicted", DAY.format(1.5), DAY.format(4.25), 0.75)},
            ),
            VersionLine(
                2, "trl-policy-v2", None, "skipped", "out_of_window", None, {"r0": Cell("skipped")}
            ),
        ),
        publish_to_ack=Latency(1, 0.75, 0.75),
        phases={"watcher.load": Latency(1, 0.005, 0.005)},
        requests={"sent": 3, "failed": 0, "names": 1},
        checks=(
            Check(
                "out_of_window_evicted",
                "every version out of the window is gone",
                ok=ok,
                detail="r0 [x]",
            ),
        ),
    )


def shown(found: Report) -> str:
    out = io.StringIO()
    show(found, Console(file=out, width=120))
    return out.getvalue()


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.95)) == (50.0, 95.0)
    assert quantile([7.0], 0.95) == 7.0
    assert latency([]) is None


def test_phases_come_in_the_order_in_which_they_happen() -> None:
    rows = [
        PhaseRow("l", "run", 1, source, phase, 0.5)
        for source, phase in (("r1", "load"), ("r0", "fetch"), ("publisher", "save"), ("r0", "x"))
    ]
    assert list(phase_latencies(rows)) == [
        "publisher.save",
        "watcher.fetch",
        "watcher.load",
        "watcher.x",
    ]


def test_the_table_shows_times_since_the_first_publish() -> None:
    text = shown(report())
    assert "acked 0.50 evicted 3.25" in text
    assert "skipped" in text
    assert "ok     out_of_window_evicted" in text
    assert "MISSED" not in text
    assert "r0 [x]" in text


def test_a_missed_check_is_named() -> None:
    found = report(ok=False)
    assert "MISSED out_of_window_evicted" in shown(found)
    assert found.as_json()["ok"] is False


def test_without_a_terminal_there_are_plain_lines_and_no_colours() -> None:
    out = io.StringIO()
    with Progress(Console(file=out)).step("starting [two] engines") as step:
        step.update("one is up")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["… starting [two] engines", "  one is up"]
    assert lines[2].startswith("✓ one is up (0.")
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_step_ends_in_one_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True)).step("working"):
        pass
    assert "✓" in out.getvalue().splitlines()[-1]


def test_a_step_that_fails_is_not_shown_as_done() -> None:
    out = io.StringIO()
    with pytest.raises(OSError, match="broken"), Progress(Console(file=out)).step("working"):
        raise OSError("broken")
    assert "✓" not in out.getvalue()
