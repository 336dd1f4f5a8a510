"""How long a simulation runs.

`POLICYLINE_SIMULATION` is `quick` (the same run everywhere), `soak`, or the number of one piece of
a soak. A soak is made of pieces: each is a process of its own, whose number is its seed, as many at
a time as there are cores, until enough steps were made.
"""

from __future__ import annotations

import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import ClassVar, Final

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    run_state_machine_as_test,
)

PROFILE: Final = os.environ.get("POLICYLINE_SIMULATION", "quick")
SOAK_STEPS: Final = 100_000
SOAK_TIMEOUT_S: Final = 8 * 3600
PIECE_TIMEOUT_S: Final = 2 * 3600
_EXAMPLES: Final = 25
"""Of a piece; a failure is known after it."""
_EXAMPLE_STEPS: Final = 100
_COUNTED: Final = re.compile(r"^(\d+) steps$", re.MULTILINE)


def timeout_s(quick_s: float) -> float:
    """The time a test may take."""
    return {"quick": quick_s, "soak": SOAK_TIMEOUT_S}.get(PROFILE, PIECE_TIMEOUT_S)


class Counted(RuleBasedStateMachine):
    """Counts the steps of all its runs."""

    steps_made: ClassVar[int] = 0

    @invariant()
    def count(self) -> None:
        Counted.steps_made += 1


def run(machine: type[Counted], quick: settings, request: pytest.FixtureRequest) -> None:
    """Run a state machine as the profile says, from the test that is `request`'s."""
    if PROFILE == "soak":
        soak(request)
        return
    Counted.steps_made = 0
    how = quick
    if PROFILE != "quick":
        seed(int(PROFILE))(machine)
        how = settings(
            quick,
            derandomize=False,
            max_examples=_EXAMPLES,
            stateful_step_count=_EXAMPLE_STEPS,
            # what `explain` tells is not worth the hours
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
        )
    run_state_machine_as_test(machine, settings=how)
    print(f"\n{Counted.steps_made} steps")


@dataclass(frozen=True)
class Piece:
    """One that has ended."""

    number: int
    steps: int
    seconds: float
    output: str
    passed: bool


def soak(request: pytest.FixtureRequest) -> None:
    """Run pieces of this test until enough steps were made, or one fails."""
    name = request.node.nodeid
    first = random.SystemRandom().randrange(1_000_000) * 1000
    cores = os.cpu_count() or 1
    ended: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    enough = threading.Event()

    def work(number: int) -> None:
        while not enough.is_set():
            ended.put(_run_piece(request, number))
            number += cores

    started = time.monotonic()
    workers = [threading.Thread(target=work, args=(first + n,)) for n in range(cores)]
    print(f"\n{name}: {SOAK_STEPS:,} steps in pieces, {cores} at a time", flush=True)
    for worker in workers:
        worker.start()
    steps, failed = 0, None
    try:
        while steps < SOAK_STEPS and failed is None:
            piece = ended.get()
            steps += piece.steps
            seconds = time.monotonic() - started
            print(
                f"  {steps:,} steps, {steps / seconds:.0f}/s; piece {piece.number}: "
                f"{piece.steps:,} in {piece.seconds:.0f} s{'' if piece.passed else ', FAILED'}",
                flush=True,
            )
            failed = None if piece.passed else piece
    finally:  # also when somebody interrupts it
        enough.set()
        for worker in workers:
            worker.join()
    while failed is None and not ended.empty():
        piece = ended.get()
        failed = None if piece.passed else piece
    if failed is not None:
        again = f"PYTHONHASHSEED=0 POLICYLINE_SIMULATION={failed.number} pytest -s '{name}'"
        pytest.fail(f"{failed.output}\nagain: {again}", pytrace=False)


def _run_piece(request: pytest.FixtureRequest, number: int) -> Piece:
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, request.node.nodeid],
        cwd=request.config.rootpath,
        env={**os.environ, "POLICYLINE_SIMULATION": str(number), "PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    counted = _COUNTED.search(done.stdout)
    return Piece(
        number,
        int(counted[1]) if counted else 0,
        time.monotonic() - started,
        done.stdout,
        passed=done.returncode == 0 and counted is not None,
    )
