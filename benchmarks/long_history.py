"""A long, true history as an export: what `import` builds big ledgers from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from policyline.ledger import events as kinds
from policyline.ledger.db import schema
from policyline.ledger.events import GENESIS_HASH, Event, NewEvent, seal
from policyline.ledger.manifest import Anchor, FileEntry, Manifest, version_digest
from policyline.ledger.names import policy_name
from policyline.ledger.rollouts import RolloutRow, rollouts_hash
from policyline.ledger.transfer import FORMAT

LINE = "trl-policy"
RUN = "long"
REPLICAS = ("r0", "r1")
INCARNATION = "1000.5"
WINDOW = 5
EVENTS_OF_A_VERSION = 11
LEDGER_ID = "f" * 32
START = datetime(2026, 1, 1, tzinfo=UTC)
PROBE = json.dumps([-0.123456789 * i for i in range(1, 16)])


def write_long_history(file: Path, events: int, rollouts: int) -> None:
    """Write an export of at least `events` events and exactly `rollouts` rollouts."""
    history = _History()
    body = file.with_suffix(".body")
    with body.open("w", encoding="utf-8") as out:
        for line in history.until(events, rollouts):
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
    header = {
        "format": FORMAT,
        "schema": schema.SCHEMA_REVISION,
        "ledger_id": LEDGER_ID,
        "events": history.seq,
        "head": history.hash,
    }
    with file.open("w", encoding="utf-8") as out, body.open(encoding="utf-8") as lines:
        out.write(json.dumps(header) + "\n")
        out.writelines(lines)
    body.unlink()


class _History:
    """One run: versions published, fetched, acked by two replicas, current, evicted."""

    def __init__(self) -> None:
        self.seq = 0
        self.hash = GENESIS_HASH
        self.version = 0
        self._digests: dict[int, str] = {}

    def until(self, count: int, rollouts: int) -> Iterator[dict[str, Any]]:
        """Lines of events, each batch of rollouts after its event; ends with a whole version."""
        recorded, a_version = 0, 1 + rollouts * EVENTS_OF_A_VERSION // count
        for event in self._events(count):
            yield _line(event)
            last = self.seq + EVENTS_OF_A_VERSION >= count
            if event.kind == kinds.CURRENT_ADVANCED and recorded < rollouts:
                size = rollouts - recorded if last else min(a_version, rollouts - recorded)
                batch = [_rollout(recorded + n, self.version) for n in range(size)]
                yield _line(self._event(kinds.ROLLOUTS_RECORDED, _batch_payload(batch)))
                for rollout in batch:
                    row = asdict(rollout)
                    del row["id"]
                    yield {"rollout": row}
                recorded += size

    def _events(self, count: int) -> Iterator[Event]:
        yield self._event(kinds.RUN_OPENED, _OPENED, epoch=1)
        for replica in REPLICAS:
            facts = {**_FACTS, "incarnation": INCARNATION}
            yield self._event(kinds.REPLICA_JOINED, facts, replica=replica, generation=1)
        while self.seq < count:
            yield from self._life_of_a_version()

    def _life_of_a_version(self) -> Iterator[Event]:
        self.version += 1
        number = self.version
        reserved = self._event(
            kinds.VERSION_RESERVED, {"attempt": f"a{number}"}, version=number, epoch=1
        )
        yield reserved
        manifest = _manifest(number, reserved)
        self._digests[number] = manifest.digest
        published = {
            "digest": manifest.digest,
            "size_bytes": manifest.size_bytes,
            "manifest": manifest.to_text(),
        }
        yield self._event(kinds.VERSION_PUBLISHED, published, version=number, epoch=1)
        yield self._event(kinds.CANDIDATE_NAMED, {"skipped": []}, version=number)
        for replica in REPLICAS:
            payload = {"digest": manifest.digest}
            yield self._event(
                kinds.VERSION_FETCHED, payload, version=number, replica=replica, generation=1
            )
            payload = {**payload, "incarnation": INCARNATION, "build": "b", "probe": PROBE}
            yield self._event(
                kinds.VERSION_ACKED, payload, version=number, replica=replica, generation=1
            )
        yield self._event(kinds.CURRENT_ADVANCED, {"reason": "acked by all"}, version=number)
        old = self._digests.pop(number - WINDOW, None)
        for replica in REPLICAS if old else ():
            yield self._event(
                kinds.VERSION_EVICTED,
                {"digest": old, "reason": "out of the window"},
                version=number - WINDOW,
                replica=replica,
                generation=1,
            )

    def _event(self, kind: str, payload: dict[str, Any], **columns: Any) -> Event:
        self.seq += 1
        new = NewEvent(
            kind=kind,
            line=LINE,
            run=RUN,
            key=f"key-{self.seq}",
            actor="trainer@node:1",
            payload=payload,
            **columns,
        )
        moment = START + timedelta(seconds=self.seq)
        event = seal(
            new,
            seq=self.seq,
            recorded_at=moment.isoformat(timespec="microseconds"),
            prev_hash=self.hash,
        )
        self.hash = event.hash
        return event


_FACTS: dict[str, Any] = {"build": "b", "max_loras": 6, "url": "", "keeps": []}
_OPENED: dict[str, Any] = {
    "closes": None,
    "holder": "trainer@node:1",
    "max_staleness": WINDOW - 1,
    "min_ready": 1,
    "ready_grace_s": 5.0,
    "candidate_timeout_s": 120.0,
    "parent_run": None,
    "parent_version": None,
    "lineage": {},
}


def _line(event: Event) -> dict[str, Any]:
    return {"event": [getattr(event, name) for name in Event.__slots__]}


def _batch_payload(batch: list[RolloutRow]) -> dict[str, Any]:
    return {
        "batch": batch[0].batch,
        "count": len(batch),
        "versions": sorted({r.version for r in batch}),
        "sha256": rollouts_hash(batch),
    }


def _manifest(number: int, reserved: Event) -> Manifest:
    sha256 = hashlib.sha256(str(number).encode()).hexdigest()
    files = (
        FileEntry("adapter_config.json", 900, "a" * 64),
        FileEntry("adapter_model.safetensors", 200_000, sha256),
    )
    return Manifest(
        line=LINE,
        run=RUN,
        version=number,
        epoch=1,
        attempt=f"a{number}",
        digest=version_digest(files),
        files=files,
        anchor=Anchor(LEDGER_ID, reserved.seq, reserved.hash),
        adapter={"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
        metadata={"step": number, "learning_rate": 4e-5},
    )


def _rollout(number: int, version: int) -> RolloutRow:
    moment = START + timedelta(seconds=number)
    return RolloutRow(
        request=f"request-{number:08d}",
        run=RUN,
        version=version,
        replica=REPLICAS[number % 2],
        asked_name=policy_name(LINE, version),
        status=200,
        started_at=moment.isoformat(timespec="microseconds"),
        prefill_s=0.02,
        decode_s=0.8,
        prompt_tokens=128,
        completion_tokens=200,
        episode=f"episode-{number // 8}",
        line=LINE,
        batch=f"batch-{version}",
        staleness=0,
    )
