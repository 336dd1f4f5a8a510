"""`make train-demo`: TRL trains a tiny model on this CPU against two real vLLM servers.

Starts two servers and their sidecars, trains with examples/async_grpo.py until the reward has
risen, and ends with the audit of the last version and a picture: reward, staleness, and seconds
from publication to the last ack, per version. Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from policyline.demo.fleet import Fleet, run_to_end
from policyline.demo.run import require_engine
from policyline.demo.settings import DemoSettings, EngineKind
from policyline.ledger import Ledger
from policyline.ledger.canonical import parse_object
from policyline.ledger.db.migrate import upgrade_url

EXAMPLE = Path(__file__).with_name("async_grpo.py")


async def main() -> int:
    """Run it; return the exit code."""
    given = _parser().parse_args()
    require_engine(EngineKind.VLLM)
    workdir = given.workdir or Path(tempfile.mkdtemp(prefix="policyline-train-"))
    settings = DemoSettings(workdir=workdir, run="train-demo")
    settings.storage.mkdir(parents=True)
    upgrade_url(str(settings.ledger))
    with Fleet(settings) as fleet, Ledger(str(settings.ledger)) as ledger:
        _say("making a tiny model")
        command = [sys.executable, "-m", "policyline.demo.tiny_model", "base", str(settings.model)]
        command += ["--head-scale", "8"]
        await run_to_end(command, settings.logs / "base.log", "making the model")
        _say("starting two vLLM servers and their sidecars")
        fleet.start_engines()
        async with AsyncExitStack() as stack:
            await fleet.wait_engines(stack)
            await fleet.start_sidecars(ledger)
        _say(f"training {given.steps} steps")
        status = await asyncio.to_thread(_train, settings, fleet, given.steps)
        if status:
            _say(f"training failed; see {settings.logs / 'trainer.log'}")
            return status
        rows = _per_version(ledger, settings.line)
        picture = given.picture or workdir / "training.png"
        draw(rows, picture)
    _audit(settings, rows)
    _say(f"picture: {picture}")
    return 0 if _report(rows) else 1


def _train(settings: DemoSettings, fleet: Fleet, steps: int) -> int:
    command = [sys.executable, str(EXAMPLE), "--profile", "tiny", "--model", str(settings.model)]
    command += ["--vllm", next(iter(fleet.engines.values())).url, "--steps", str(steps)]
    for replica, engine in fleet.engines.items():
        command += ["--server", f"{replica}={engine.url}"]
    command += ["--ledger", str(settings.ledger), "--storage", str(settings.storage)]
    command += ["--run", settings.run, "--output", str(settings.workdir / "out")]
    with (settings.logs / "trainer.log").open("wb") as log:
        return subprocess.run(  # noqa: S603 - the command is ours
            command, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode


def _per_version(ledger: Ledger, line: str) -> list[dict[str, Any]]:
    """What the ledger knows of each version that training has led to."""
    acked: dict[int, list[str]] = {}
    for residency in ledger.residency(line):
        if residency.acked_at is not None:
            acked.setdefault(residency.version, []).append(residency.acked_at)
    found = []
    for row in ledger.versions(line=line):
        metadata = parse_object(row.manifest or "{}").get("metadata", {})
        if row.published_at and "reward" in metadata:
            published = datetime.fromisoformat(row.published_at)
            acks = [datetime.fromisoformat(at) for at in acked.get(row.version, [])]
            found.append(
                {
                    "version": row.version,
                    "reward": metadata["reward"],
                    "staleness": metadata.get("staleness_mean", 0.0),
                    "ratio": metadata.get("ratio"),
                    "acked_s": (max(acks) - published).total_seconds() if acks else None,
                }
            )
    return found


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Three curves over the versions."""
    import matplotlib as mpl  # noqa: PLC0415 - takes a second; only the demo draws

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    curves = (
        ("reward", "reward"),
        ("staleness", "staleness (versions)"),
        ("acked_s", "publish to last ack (s)"),
    )
    figure, axes = plt.subplots(len(curves), 1, sharex=True, figsize=(8, 7))
    for axis, (key, label) in zip(axes, curves, strict=True):
        axis.plot([r["version"] for r in rows], [r[key] for r in rows], marker=".")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("version")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def _audit(settings: DemoSettings, rows: list[dict[str, Any]]) -> None:
    policyline = [sys.executable, "-m", "policyline", "ledger"]
    where = ["--ledger", str(settings.ledger)]
    for verb in (["versions"], ["phases"], ["audit", str(rows[-1]["version"])]):
        subprocess.run([*policyline, *verb, *where], check=True)  # noqa: S603 - ours


def _report(rows: list[dict[str, Any]]) -> bool:
    """Whether the reward has risen visibly: by a fifth from the first fifth to the last."""
    fifth = max(1, len(rows) // 5)
    first = fmean(r["reward"] for r in rows[:fifth])
    last = fmean(r["reward"] for r in rows[-fifth:])
    ratios = [r["ratio"] for r in rows if r["ratio"] is not None]
    _say(f"reward {first:.3f} -> {last:.3f}; ratio {min(ratios):.4f} to {max(ratios):.4f}")
    return last >= 1.2 * first


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a tiny model over two real vLLM servers.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--workdir", type=Path, default=None, help="empty or new; default: temporary"
    )
    parser.add_argument("--picture", type=Path, default=None)
    return parser


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
