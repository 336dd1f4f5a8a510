"""Small builders for tests of the ledger: manifests without files, replicas without engines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from policyline.ledger import Claim, EngineFacts, Ledger, Membership
from policyline.ledger.manifest import FileEntry, Manifest, version_digest
from policyline.ledger.read.replay import Replayer, State
from policyline.ledger.store import Reservation

LINE = "trl-policy"
FACTS = EngineFacts(incarnation="1000.5", build="0.32.0/bf16", max_loras=6)


def manifest_for(
    reservation: Reservation, content: str = "", metadata: Mapping[str, Any] | None = None
) -> Manifest:
    """A manifest whose digest depends on `content` (default: the version number)."""
    text = content or f"version {reservation.version}"
    entry = FileEntry(
        path="adapter_model.safetensors",
        size_bytes=len(text),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
    return Manifest(
        line=reservation.line,
        run=reservation.run,
        version=reservation.version,
        epoch=reservation.epoch,
        attempt=reservation.attempt,
        digest=version_digest([entry]),
        files=(entry,),
        anchor=reservation.anchor,
        metadata=metadata or {},
    )


def publish(ledger: Ledger, claim: Claim, content: str = "") -> Manifest:
    """Reserve and publish the next version."""
    manifest = manifest_for(ledger.reserve(claim), content)
    ledger.publish(claim, manifest)
    return manifest


def acknowledge(
    ledger: Ledger, member: Membership, manifest: Manifest, incarnation: str = "1000.5"
) -> None:
    """Ack a version as a watcher would after its checks."""
    ledger.ack(
        member,
        manifest.version,
        digest=manifest.digest,
        incarnation=incarnation,
        build=FACTS.build,
        probe=(-1.25, -0.5),
    )


def state_at(ledger: Ledger, line: str, seq: int) -> State:
    """The line folded from its beginning up to event `seq`."""
    replayer = Replayer(line)
    for event in ledger.events(line=line, last=seq):
        replayer.take(event)
    return replayer.state()
