"""The invariants of the watcher, checked against what engines and disks hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE, parse_policy_name, policy_name
from tests.simulation.watcher.settings import (
    REPLICAS,
    SLOTS,
    TTL_S,
    WEIGHTS,
)
from tests.simulation.watcher.watchers import Watcher

if TYPE_CHECKING:
    from tests.simulation.watcher.world import World


class Invariants:
    """Notes each violation in `world.violations`.

    Args:
        world: whose truth is compared with the acts of its watchers.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.beaten_s: dict[tuple[str, int], float] = {}
        """(replica, generation) -> when its heartbeat moved last, on the injected clock."""
        self.stolen: dict[tuple[str, str], int] = {}
        """(replica, name) that was unloaded behind a watcher's back -> its generation."""
        self._recorded: tuple[int, str] = (0, "")
        self._hashed: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def note_theft(self, replica: str, name: str) -> None:
        """Somebody unloaded a name; the present watcher has not seen it, the next one must.

        One that is about to join and has looked already is the present one.
        """
        row, watcher = self._world.view().replicas.get(replica), self._world.watchers.get(replica)
        joins = watcher is not None and watcher.generation is None and watcher.looked
        self.stolen[replica, name] = (0 if row is None else row.generation) + joins

    # --- what a watcher does, at the moment it does it

    def asking(self, watcher: Watcher, request: httpx.Request) -> None:
        path = request.url.path.rstrip("/")
        if path in {"/metrics", "/v1/models"}:
            watcher.reads[path] = False
        if path != "/v1/unload_lora_adapter":
            return
        name = json.loads(request.content)["lora_name"]
        request.extensions["asked_by"] = watcher.generation
        service = self._world.engines[watcher.replica].service
        adapter = None if service is None else service.registry.get(name)
        ours = adapter is not None and adapter.path.startswith(str(watcher.cache) + "/")
        if not watcher.looked:
            self._world.violations.append(
                f"I10: {watcher.replica} unloads {name} after a failed read"
            )
        if ours and watcher.wants(name):
            self._world.violations.append(f"I3: {watcher.replica} unloads {name}, which is desired")

    def done(self, replica: str, request: httpx.Request) -> None:
        """An unload that was on its way when its watcher was replaced is one behind the successor's
        back: the ledger fences watchers, and no engine does."""
        row = self._world.view().replicas.get(replica)
        asked_by = request.extensions.get("asked_by")
        if asked_by is not None and row is not None and asked_by < row.generation:
            self.note_theft(replica, json.loads(request.content)["lora_name"])

    def answered(
        self, watcher: Watcher, request: httpx.Request, answer: httpx.Response | None
    ) -> None:
        path = request.url.path.rstrip("/")
        if path in {"/metrics", "/v1/models"}:
            watcher.reads[path] = answer is not None and answer.status_code == 200

    def removing(self, path: Path) -> None:
        """A local copy is about to disappear."""
        for watcher in self._world.watchers.values():
            if path.is_relative_to(watcher.cache):
                self._check_removal(watcher, path)

    def _check_removal(self, watcher: Watcher, path: Path) -> None:
        name = path.name.rpartition("-")[0]
        process = self._world.engines[watcher.replica]
        shown = f"{watcher.replica} deletes the files of {name}"
        if not watcher.looked:
            self._world.violations.append(f"I10: {shown} after a failed read")
        if watcher.wants(name):
            self._world.violations.append(f"I3: {shown}, which is desired")
        listed = process.service.registry if process.service is not None else {}
        if name in listed and listed[name].path == str(path):
            self._world.violations.append(f"I3: {shown}, which the engine lists")
        if name in process.busy():
            self._world.violations.append(f"I3: {shown}, on which a request runs")

    # --- the truth

    def hash_of(self, file: Path) -> str:
        """sha256 of a file; empty when it is not there."""
        try:
            status = file.stat()
        except FileNotFoundError:
            return ""
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._hashed.get(file)
        if known is None or known[0] != stamp:
            known = self._hashed[file] = (stamp, hashlib.sha256(file.read_bytes()).hexdigest())
        return known[1]

    def check(self) -> None:
        """I2 and I3, as the engines and the disks are; and time in the ledger never goes back."""
        for event in self._world.trainer.ledger.events(after=self._recorded[0]):
            if event.recorded_at < self._recorded[1]:
                self._world.violations.append(f"event {event.seq} is older than its predecessor")
            self._recorded = (event.seq, event.recorded_at)
        view = self._world.view()
        for replica, process in self._world.engines.items():
            service = process.service
            if service is None:
                continue
            listed = {name: adapter.path for name, adapter in service.registry.items()}
            for name, path in listed.items():
                version = parse_policy_name(DEFAULT_LINE, name)
                assert version is not None
                if self.hash_of(Path(path) / WEIGHTS) != self._world.trainer.hashes[version]:
                    self._world.violations.append(
                        f"I3: {replica} lists {name}; its files are not there"
                    )
            if view.replicas.get(replica) is None:
                continue
            if view.replicas[replica].incarnation != process.incarnation:
                continue
            self._check_acks(replica, view, listed)

    def _check_acks(self, replica: str, view: LineSnapshot, listed: Collection[str]) -> None:
        for version in self._world.trainer.kinds:
            name = policy_name(DEFAULT_LINE, version)
            if name in listed:
                self.stolen.pop((replica, name), None)
            elif (
                replica in view.acked_by(version)
                and self.stolen.get((replica, name)) != view.replicas[replica].generation
            ):
                self._world.violations.append(f"I2: {replica} acked {name} and does not list it")

    def unserved(self) -> list[str]:
        """What is desired and not served, by replica; empty when all is as it should be."""
        view = self._world.view()
        missing = [f"v{view.candidate} is still candidate"] if view.candidate is not None else []
        for replica in REPLICAS:
            reported = {v: r.state for (who, v), r in view.residency.items() if who == replica}
            wanted = [d.version for d in view.desired if reported.get(d.version) != "rejected"]
            service = self._world.engines[replica].service
            listed = {} if service is None else service.registry
            missing += [
                f"{replica}: v{v} ({reported.get(v)})"
                for v in wanted[:SLOTS]
                if replica not in view.acked_by(v) or policy_name(DEFAULT_LINE, v) not in listed
            ]
        return missing


class LedgerWitness:
    """Checks what one watcher commits, at the moment of the commit."""

    def __init__(self, world: World, replica: str) -> None:
        self._world = world
        self._replica = replica
        self.watcher: Watcher | None = None

    def acked(self, version: int, digest: str, incarnation: str) -> None:
        """I4, at the moment of the commit."""
        world, process = self._world, self._world.engines[self._replica]
        if process.incarnation != incarnation or process.service is None:
            return  # it died between the last look and the commit, and its acks with it
        name = policy_name(DEFAULT_LINE, version)
        shown = f"I4: {self._replica} acks {name}"
        adapter = process.service.registry.get(name)
        assert self.watcher is not None
        if adapter is None and (self._replica, name) not in world.invariants.stolen:
            world.violations.append(f"{shown}, which the engine does not list")
        if adapter is None:
            return
        if not adapter.path.startswith(str(self.watcher.cache) + "/"):
            world.violations.append(f"{shown}, which the engine has from {adapter.path}")
        elif (
            world.invariants.hash_of(Path(adapter.path) / WEIGHTS) != world.trainer.hashes[version]
        ):
            world.violations.append(f"{shown}, whose bytes are not the published ones")

    def spoke(self) -> None:
        """I2, when acks of a former life may have come into force again."""
        self._world.invariants.check()

    def beaten(self, generation: int) -> None:
        """A heartbeat has moved."""
        self._world.invariants.beaten_s[self._replica, generation] = self._world.loop.time()

    def declared_lost(self, replica: str, generation: int) -> None:
        """Whatever the wall clocks show: only after a heartbeat stood for the TTL."""
        still_s = self._world.loop.time() - self._world.invariants.beaten_s.get(
            (replica, generation), 0.0
        )
        if still_s < TTL_S:
            self._world.violations.append(
                f"{self._replica} declares {replica} lost, which beat {still_s:g} s ago"
            )

    def rejected(self, version: int, reason: str) -> None:
        """I9: nothing good is given up, but for a version during which the engine died twice."""
        world = self._world
        deaths = world.engines[self._replica].deaths - world.born_at_death[version][self._replica]
        if world.trainer.kinds[version] in {"good", "missing"} and deaths < 2:
            world.violations.append(f"I9: {self._replica} rejects good v{version}: {reason}")
