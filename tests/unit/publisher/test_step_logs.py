"""What logs become in a version's metadata."""

from __future__ import annotations

from policyline.publisher.training.step_logs import StepLogs, ratio_flag


def test_steps_are_merged_and_what_is_no_number_is_left_out() -> None:
    logs = StepLogs()
    logs.add({"loss": 1.0, "learning_rate": 0.1, "sample/staleness_max": 2.0, "reward": 0.5})
    logs.add({"loss": 3.0, "learning_rate": 0.2, "sample/staleness_max": 4.0, "epoch": 1})
    logs.add({"loss": float("nan"), "grad_norm": None, "sample/dropped_stale_total": 2.0})
    logs.add({"sample/staleness_mean": 1.0})
    logs.add({"sample/staleness_mean": 2.0})
    logs.consume(7)
    logs.consume(7)
    logs.consume(10)
    assert logs.take() == {
        "loss": 2.0,
        "learning_rate": 0.2,
        "staleness_max": 4.0,
        "staleness_mean": 1.5,
        "reward": 0.5,
        "dropped_stale": 2.0,
        "samples": {"7": 2, "10": 1},
    }
    assert logs.take() == {}


def test_a_ratio_away_from_one_is_flagged() -> None:
    assert ratio_flag(1.004, 0.05, "p-v3") is None
    assert ratio_flag(None, 0.05, "p-v3") is None
    assert ratio_flag(0.9, 0.05, "p-v3") == "ratio 0.9000 after p-v3"
    assert ratio_flag(1.2, 0.05, "p-v3") == "ratio 1.2000 after p-v3"
