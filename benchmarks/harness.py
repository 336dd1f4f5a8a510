"""What every benchmark shares: arguments, the machine, the table, the bars and the exit code.

A benchmark measures floor (or peer) and result in the same run, returns an `Outcome`, and calls
`main`. With `--json` stdout is one object: `benchmark`, `machine`, `versions`, `quick`, `n`,
`figures`, `bars` and `ok`. Exit 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # otherwise benchmarks/ledger.py hides the package `ledger`

PACKAGES = ("policyline", "sqlalchemy", "aiohttp", "starlette", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit on a figure: `value` `op` `limit`."""

    name: str
    value: float
    limit: float
    op: Literal["<=", ">="] = "<="

    @property
    def ok(self) -> bool:
        """Whether the bar is met. NaN meets no bar."""
        return self.value <= self.limit if self.op == "<=" else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, with the floor or peer that was measured in the same run."""

    name: str
    value: float
    unit: str
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over floor."""
        return self.value / self.floor if self.floor else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a benchmark."""

    n: int
    """Number of samples."""
    figures: tuple[Figure, ...]
    bars: tuple[Bar, ...]


def main(name: str, purpose: str, measure: Callable[[bool], Outcome]) -> None:
    """Parse the arguments, call `measure(quick)`, print, and exit."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer samples: a smoke test")
    arguments = parser.parse_args()
    outcome = measure(arguments.quick)
    _print_table(name, outcome)
    if arguments.json:
        print(json.dumps(as_json(name, outcome, quick=arguments.quick), indent=2))
    sys.exit(0 if all(bar.ok for bar in outcome.bars) else 1)


def as_json(name: str, outcome: Outcome, *, quick: bool) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "benchmark": name,
        "machine": machine(),
        "versions": versions(),
        "quick": quick,
        "n": outcome.n,
        "figures": [
            {
                "name": figure.name,
                "value": _rounded(figure.value),
                "unit": figure.unit,
                "floor": _rounded(figure.floor),
                "ratio": _rounded(figure.ratio),
            }
            for figure in outcome.figures
        ],
        "bars": [
            {
                "name": bar.name,
                "value": _rounded(bar.value),
                "limit": bar.limit,
                "op": bar.op,
                "ok": bar.ok,
            }
            for bar in outcome.bars
        ],
        "ok": all(bar.ok for bar in outcome.bars),
    }


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the share `q` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def log(line: str) -> None:
    """Print progress on stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """The hardware and Python that ran the benchmark; nothing that names the machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that do the work."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else "unknown"


def _print_table(name: str, outcome: Outcome) -> None:
    about = machine()
    log(f"{name}: n={outcome.n}, {about['cpus']} cpus ({about['cpu']}), Python {about['python']}")
    log(f"  {'':44} {'floor':>10} {'result':>10} {'ratio':>7}")
    for figure in outcome.figures:
        floor = "" if figure.floor is None else f"{figure.floor:.4g}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        log(f"  {figure.name:44} {floor:>10} {figure.value:>10.4g} {ratio:>7} {figure.unit}")
    for bar in outcome.bars:
        verdict = "met" if bar.ok else "MISSED"
        log(f"  {verdict}: {bar.name}: {bar.value:.4g} {bar.op} {bar.limit:g}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
