"""The invariants that the demo shows, each as one check with a name.

The checks read what is there (engines' answers, bytes on disk, the ledger) and nothing that the
demo remembers of its own doing, but for the client's requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from policyline.demo.client import Traffic
from policyline.demo.fleet import PROMPT, orphans
from policyline.ledger import Ledger
from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.manifest import MANIFEST_NAME, Manifest
from policyline.ledger.names import policy_name
from policyline.ledger.read.verify import verify
from policyline.ledger.rows import VersionRow
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError

SAME: float = 0.01
"""Greatest mean difference (natural log) between two replicas' answers under one name. vLLM 0.32 on
a CPU repeats exactly from process to process."""
DIFFERENT: float = 0.05
"""Least mean difference between two versions' answers; rank-1 adapters of std 0.3 differ by 0.2."""


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant and whether it is met."""

    name: str
    title: str
    ok: bool
    detail: str


@dataclass(slots=True)
class EngineView:
    """What one engine reports."""

    paths: dict[str, str] = field(default_factory=dict)
    """Adapter -> the path it was loaded from, as GET /v1/models lists it."""
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Adapter -> log-probabilities of the prompt's tokens."""
    errors: dict[str, str] = field(default_factory=dict)
    """Adapter -> why it gave no scores."""


async def observe(
    engines: Mapping[str, EngineClient], names: Sequence[str]
) -> dict[str, EngineView]:
    """Ask every engine what it lists, and for its scores under each of `names`."""
    views = await asyncio.gather(*(_observe_one(client, names) for client in engines.values()))
    return dict(zip(engines, views, strict=True))


async def _observe_one(client: EngineClient, names: Sequence[str]) -> EngineView:
    models = await client.models()
    view = EngineView(paths={adapter.name: adapter.path for adapter in models.adapters})
    for name in names:
        try:
            view.scores[name] = await client.score(name, PROMPT)
        except EngineError as error:
            view.errors[name] = str(error)
    return view


def window_served(view: LineSnapshot, engines: Mapping[str, EngineView], newest: int) -> Check:
    """Every desired version is acked by every replica, listed, and answers."""
    missed = [] if view.current == newest else [f"v{newest} is not current"]
    for desired in view.desired:
        acked_by = view.acked_by(desired.version)
        for replica, engine in engines.items():
            if replica not in acked_by:
                missed.append(f"{desired.name} has no ack of {replica}")
            if desired.name not in engine.paths:
                missed.append(f"{replica} does not list {desired.name}")
            if desired.name in engine.errors:
                missed.append(f"{replica} {desired.name}: {engine.errors[desired.name]}")
    count = len(view.desired)
    return _check(
        "window_served",
        "every version in the window is served by every replica",
        missed,
        f"{count} versions on {len(engines)} replicas",
    )


def answers_differ(view: LineSnapshot, engines: Mapping[str, EngineView]) -> Check:
    """The replicas agree under each name, and no two neighbours answer alike."""
    names = [policy_name(view.line.line, v) for v in sorted(d.version for d in view.desired)]
    missed = []
    agree = [0.0]
    differ = []
    for name in names:
        for (one, first), (other, second) in pairwise(engines.items()):
            gap = _distance(first.scores.get(name), second.scores.get(name))
            agree.append(gap)
            if not gap <= SAME:
                missed.append(f"{one} and {other} differ by {gap:.3g} under {name}")
    for replica, engine in engines.items():
        for older, newer in pairwise(names):
            gap = _distance(engine.scores.get(older), engine.scores.get(newer))
            differ.append(gap)
            if not gap >= DIFFERENT:
                missed.append(f"{older} and {newer} differ by only {gap:.3g} on {replica}")
    least = f"{min(differ):.2f}" if differ else "none to compare"
    return _check(
        "answers_differ",
        "each version answers differently from its neighbours, and alike on every replica",
        missed,
        f"neighbours by at least {least} nats a token, replicas by at most {max(agree):.2g}",
    )


def out_of_window_evicted(
    view: LineSnapshot, rows: Sequence[VersionRow], engines: Mapping[str, EngineView]
) -> Check:
    """No engine lists a version that is not in the desired set."""
    desired = {d.version for d in view.desired}
    out_of_window = {policy_name(r.line, r.version) for r in rows if r.version not in desired}
    missed = [
        f"{replica} still lists {name}"
        for replica, engine in engines.items()
        for name in sorted(out_of_window & engine.paths.keys())
    ]
    return _check(
        "out_of_window_evicted",
        "every version out of the window is gone from /v1/models",
        missed,
        f"{len(out_of_window)} versions",
    )


def no_request_failed(traffic: Traffic) -> Check:
    """The client was answered whenever the ledger promised it."""
    missed = list(traffic.failures)
    if not traffic.answered:
        missed.append("no request was answered at all")
    return _check(
        "no_request_failed",
        "no request for a served version failed",
        missed,
        f"{traffic.answered.total()} requests under {len(traffic.answered)} names, "
        f"{len(traffic.failures)} failed",
    )


def digests_agree(
    rows: Sequence[VersionRow], storage: Path, engines: Mapping[str, EngineView]
) -> Check:
    """Row, stored manifest, stored bytes and the replicas' own files have one digest."""
    missed = []
    directories = 0
    for row in rows:
        if row.digest is None:
            continue
        try:
            manifest = Manifest.from_text(row.manifest or "")
        except ManifestInvalid as error:
            missed.append(f"v{row.version}: {error}")
            continue
        if (manifest.name, manifest.digest) != (policy_name(row.line, row.version), row.digest):
            missed.append(f"{manifest.name}: the manifest is not the row's")
        stored = storage / manifest.name
        missed += _manifest_faults(stored, row.manifest or "")
        paths = (engine.paths.get(manifest.name) for engine in engines.values())
        for folder in (stored, *(Path(path) for path in paths if path is not None)):
            directories += 1
            missed += _byte_faults(folder, manifest)
    return _check(
        "digests_agree",
        "names and digests agree in ledger, storage and on every replica's disk",
        missed,
        f"{directories} directories hashed again",
    )


def replay_equals_tables(ledger: Ledger) -> Check:
    """Folding all events gives the tables, and the hash chain is whole."""
    report = verify(ledger)
    missed = [
        f"event {problem.seq}: {problem.what}" if problem.seq is not None else problem.what
        for problem in report.problems
    ]
    return _check(
        "replay_equals_tables",
        "replay of the events equals the tables",
        missed,
        f"{report.events} events folded",
    )


def no_orphaned_process(mark: str) -> Check:
    """Nothing that the demo started is left."""
    missed = [f"process {orphan}" for orphan in orphans(mark)]
    return _check("no_orphaned_process", "no process is left behind", missed, "all ended")


def _check(name: str, title: str, missed: Sequence[str], detail: str) -> Check:
    if not missed:
        return Check(name, title, ok=True, detail=detail)
    more = f" (and {len(missed) - 3} more)" if len(missed) > 3 else ""
    return Check(name, title, ok=False, detail="; ".join(missed[:3]) + more)


def _distance(first: Sequence[float] | None, second: Sequence[float] | None) -> float:
    """Mean absolute difference; not a number when one is missing."""
    if first is None or second is None:
        return float("nan")
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def _manifest_faults(folder: Path, text: str) -> Iterator[str]:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        yield f"{path} is missing"
    elif path.read_text() != text:
        yield f"{path} is not the manifest in the ledger"


def _byte_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            yield f"{path} is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256:
            yield f"{path} does not have the sha256 of the manifest"
