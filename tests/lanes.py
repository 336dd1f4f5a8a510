"""Several workers (pytest-xdist): tests on the real vLLM stay with one of them, file after file.

Two of its servers already keep two cores busy; with four, decoding and training wait for each
other, and both take many times as long. So one worker has the servers, and the others run what
does not need them, a file at a time.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

ON_VLLM: Final = (
    "tests/acceptance/test_demo_vllm.py",
    "tests/acceptance/test_quickstart.py",
    "tests/acceptance/test_router_chaos.py",
    "tests/acceptance/test_router_trl.py",
    "tests/acceptance/test_training_ratio.py",
    "tests/contract/",
    "tests/engine/",
    "tests/integration/doctor/test_engine.py",
    "tests/integration/replay/test_real_engine.py",
    "tests/integration/watcher/test_real_engine.py",
)
"""Files and directories. One that is missing here only takes longer."""


class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not typed strictly
    """A unit of work is a file, or everything that needs the real vLLM."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # `longest_first` orders them
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid)


def lane(nodeid: str) -> str:
    """The unit of work that a test belongs to."""
    return "vllm" if nodeid.startswith(ON_VLLM) else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort: the real vLLM, files that train, the rest. So no worker is left with a long one."""
    trains = {lane(item.nodeid) for item in items if item.get_closest_marker("engine")}

    def rank(item: pytest.Item) -> int:
        unit = lane(item.nodeid)
        return 0 if unit == "vllm" else 1 if unit in trains else 2

    items.sort(key=rank)
