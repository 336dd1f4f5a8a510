"""Two replicas, one ledger, one storage, and the truth about all of them.

Everything of the product is the real thing but the clock; what is checked is what the engine and
the disks hold, not what a watcher believes.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import httpx

from policyline.demo.synthetic import adapter_config, adapter_tensors, write_files
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import RunSettings
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.manifest import FileEntry, Manifest, version_digest
from policyline.ledger.names import DEFAULT_LINE, parse_policy_name, policy_name
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.errors import ReplicaTakenOver
from tests.simulation.watcher.bus import LISTENER, Bus
from tests.simulation.watcher.clock import VirtualLoop
from tests.simulation.watcher.lifeline import Killed, Lifeline
from tests.simulation.watcher.places import (
    COPIER,
    SimulatedLedger,
    SimulatedStorage,
    Weather,
    clock_from,
)
from tests.simulation.watcher.process import LONGEST_CALL_S, EngineProcess, SimulatedClient

T = TypeVar("T")
Kind = Literal["good", "corrupt", "refused", "missing"]

REPLICAS: Final = ("r0", "r1")
TRAINER: Final = "trainer"
SLOTS: Final = 4
RUN: Final = RunSettings(max_staleness=2, ready_grace_s=3.0, candidate_timeout_s=60.0)
POLL_S: Final = 5.0
LINGER_S: Final = 2.0
GRACE_S: Final = 3.0
TTL_S: Final = 20.0
FETCH_TIMEOUT_S: Final = 8.0
STOP_TIMEOUT_S: Final = 6.0
WITHIN_S: Final = 2 * POLL_S + POLL_S + LONGEST_CALL_S + RUN.ready_grace_s + 2.0
"""I8: two observation periods, the back-off in force, a call that hung when the faults stopped, the
grace for a version that one replica has rejected, and two seconds for loads and probes."""
STEP_S: Final = 0.05
"""Of the double's decoding."""
WEIGHTS: Final = "adapter_model.safetensors"

_clients: list[SimulatedClient] = []
_present: list[World] = []


@dataclass
class Watcher:
    """One life of a sidecar."""

    replica: str
    cache: Path
    lifeline: Lifeline
    ledger: SimulatedLedger
    client: SimulatedClient
    sidecar: Sidecar
    task: asyncio.Task[None]
    reads: dict[str, bool] = field(default_factory=dict)
    """Path of the engine's answers that make a look, and whether the last one came."""
    is_stopping: bool = False

    @property
    def generation(self) -> int | None:
        """Of its joining; None before it has joined."""
        return self.sidecar._status.generation

    @property
    def looked(self) -> bool:
        """Whether both halves of the last look, and the last look at the ledger, succeeded."""
        engine = self.reads.get("/metrics", False) and self.reads.get("/v1/models", False)
        return engine and self.ledger.last_view is not None

    def stop(self) -> None:
        """As SIGTERM does."""
        self.is_stopping = True
        self.sidecar.stop()

    def wants(self, name: str) -> bool:
        """Whether a name was desired, and not given up here, when it last looked."""
        view = self.ledger.last_view
        number = parse_policy_name(DEFAULT_LINE, name)
        if view is None or number not in {d.version for d in view.desired}:
            return False
        reported = view.residency.get((self.replica, number))
        return reported is None or reported.state != "rejected"


class World:
    """Everything at one place, on one injected clock.

    Args:
        root: an empty directory.
        template: an upgraded, empty ledger.
    """

    def __init__(self, root: Path, template: Path) -> None:
        self.root = root
        self.violations: list[str] = []
        self.history: list[str] = []
        """Every effect on the outside, in order: the same whenever the choices are the same."""
        self.loop = VirtualLoop()
        self.weather = Weather(self.loop.turns)
        self.bus = Bus(self.loop.turns)
        self.loop.settled = self._is_settled
        self.loop.set_exception_handler(self._on_loop_error)
        self.url = str(root / "ledger.db")
        shutil.copy(template, self.url)
        (root / "storage").mkdir()
        self.storage = DirectoryStorage(root / "storage")
        self.ledger = self._open_ledger(TRAINER, Lifeline(), Weather(self.loop.turns))
        options = ServiceOptions(EngineOptions(max_loras=SLOTS), step_delay_s=STEP_S)
        self.engines = {name: EngineProcess(options, self.violations.append) for name in REPLICAS}
        for name, process in self.engines.items():
            process.done = functools.partial(self._done, name)
        self.watchers: dict[str, Watcher] = {}
        self.lives = 0
        """Of watchers, so far."""
        self.wall_off_s = dict.fromkeys((TRAINER, *REPLICAS), 0.0)
        """How wrong the wall clock of each host is."""
        self._recorded: tuple[int, str] = (0, "")
        self.beaten_s: dict[tuple[str, int], float] = {}
        """(replica, generation) -> when its heartbeat moved last, on the injected clock."""
        self.second: set[str] = set()
        """Replicas whose present watcher has the other cache."""
        self.stolen: dict[tuple[str, str], int] = {}
        """(replica, name) that was unloaded behind a watcher's back -> its generation."""
        self.kinds: dict[int, Kind] = {}
        self.originals: dict[int, Path] = {}
        self.hashes: dict[int, str] = {}
        self.born_at_death: dict[int, dict[str, int]] = {}
        self._hashed: dict[Path, tuple[tuple[int, int, int], str]] = {}
        _present.append(self)

    # --- running it

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the injected clock; then bury who died meanwhile."""
        result = self.loop.run_until_complete(work)
        self.loop.run_until_complete(self._bury())
        return result

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.run(asyncio.sleep(seconds))

    def note(self, who: str, what: str) -> None:
        """Keep an effect for the comparison with another run of the same choices."""
        self.history.append(f"{self.loop.time():.4f} {who} {what}")

    def close(self) -> None:
        """End everything, without a check."""
        self.fair_weather()
        for watcher in self.watchers.values():
            watcher.lifeline.end()
        self.run(asyncio.sleep(0.01))
        for process in self.engines.values():
            self.run(process.kill())
        self.run(asyncio.sleep(0.01))
        self.loop.run_until_complete(self._cancel_rest())
        self.loop.await_threads()
        self.ledger.close()
        self.loop.close()
        _present.remove(self)
        shutil.rmtree(self.root)

    async def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _bury(self) -> None:
        for replica, watcher in list(self.watchers.items()):
            if watcher.lifeline.dead:
                watcher.task.cancel()
            elif not watcher.task.done():
                continue
            (result,) = await asyncio.gather(watcher.task, return_exceptions=True)
            del self.watchers[replica]
            self._release(watcher, result)

    def _release(self, watcher: Watcher, result: object, *also: type[Exception]) -> None:
        allowed: tuple[type[BaseException], ...] = also
        if watcher.lifeline.dead:
            allowed = (Killed, asyncio.CancelledError)
        elif watcher.generation is None:
            allowed = (*also, LedgerUnavailable)  # before it has joined it ends with status 3
        if isinstance(result, BaseException) and not isinstance(result, allowed):
            self.violations.append(f"the watcher of {watcher.replica} ended: {result!r}")
        watcher.lifeline.end()
        watcher.ledger.close()
        _clients.append(watcher.client)

    def _is_settled(self, thread: threading.Thread) -> bool:
        if thread.name == LISTENER:
            return self.bus.is_settled(thread)
        return not thread.name.startswith(COPIER) or thread in self.weather.stalled

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # what a killed double leaves behind is collected some time
        left = "Service.generate" in repr(context.get("task"))
        if not left and not isinstance(context.get("exception"), Killed):
            self.violations.append(f"event loop: {context}")

    # --- watchers

    def _open_ledger(
        self, host: str, lifeline: Lifeline, weather: Weather, witness: _Witness | None = None
    ) -> SimulatedLedger:
        return SimulatedLedger(
            self.url,
            self.bus,
            clock_from(lambda: self.loop.time() + self.wall_off_s[host]),
            weather=weather,
            lifeline=lifeline,
            witness=witness,
        )

    def cache(self, replica: str) -> Path:
        """Where the present watcher of a replica keeps its copies."""
        return self.root / "cache" / (f"{replica}-second" if replica in self.second else replica)

    def start_watcher(self, replica: str) -> None:
        """Start a watcher for a replica; the ledger must be reachable."""

        async def start() -> None:
            lifeline = Lifeline()
            self.lives += 1
            watcher_number = self.lives
            witness = _Witness(self, replica)
            ledger = self._open_ledger(replica, lifeline, self.weather, witness)
            client = _clients.pop() if _clients else SimulatedClient()
            client.attach(self.engines[replica], lifeline)
            settings = SidecarSettings(
                replica=replica,
                cache=self.cache(replica),
                listen="127.0.0.1:0",
                poll_interval_s=POLL_S,
                linger_s=LINGER_S,
                grace_s=GRACE_S,
                heartbeat_s=POLL_S,
                ttl_s=TTL_S,
                fetch_timeout_s=FETCH_TIMEOUT_S,
                stop_timeout_s=STOP_TIMEOUT_S,
                take_over=True,
                replace=True,
                advertise=f"http://{replica}.invalid",
            )
            storage = SimulatedStorage(self.root / "storage", self.weather, lifeline)
            sidecar = Sidecar(settings, ledger, storage, client)
            task = asyncio.create_task(sidecar.run(), name=f"sidecar-{replica}")
            watcher = Watcher(replica, settings.cache, lifeline, ledger, client, sidecar, task)
            witness.watcher = watcher
            lifeline.seen = functools.partial(self.note, f"{replica}#{watcher_number}")
            lifeline.on_death = functools.partial(_cancel_soon, self.loop, task)
            lifeline.asking = functools.partial(self._asking, watcher)
            lifeline.answered = functools.partial(self._answered, watcher)
            self.watchers[replica] = watcher

        self.run(start())

    def revive(self) -> None:
        """Start what is down, as a supervisor does."""

        async def start_engines() -> None:
            for process in self.engines.values():
                if process.service is None:
                    await process.kill()
                    process.start()

        self.run(start_engines())
        for replica in REPLICAS:
            if replica not in self.watchers and self.weather.ledger != "away":
                self.start_watcher(replica)

    def finish_stopping(self) -> None:
        """Wait for those who were told to stop; they may finish the action in hand."""
        waited_s = 0.0
        while any(watcher.is_stopping for watcher in self.watchers.values()):
            if waited_s > STOP_TIMEOUT_S + 1.0:
                self.violations.append("a watcher does not stop")
                return
            self.advance(0.5)
            waited_s += 0.5

    def supersede_watcher(self, replica: str) -> None:
        """Start a second watcher for a replica, with a cache of its own."""
        first = self.watchers.pop(replica)
        self.second ^= {replica}
        self.start_watcher(replica)

        async def end_of_the_first() -> object:
            for _ in range(400):
                if first.task.done() or first.lifeline.dead:
                    break
                await asyncio.sleep(0.1)
            if not first.task.done():
                first.lifeline.end()
            return (await asyncio.gather(first.task, return_exceptions=True))[0]

        self._release(first, self.run(end_of_the_first()), ReplicaTakenOver)

    # --- the trainer and the operator

    def publish(self, kind: Kind) -> int:
        """Publish the next version."""
        seed = len(self.kinds) + 1
        adapter = _adapter(seed, refused=kind == "refused")
        if kind == "refused":
            version = self._publish_unchecked(adapter)
        else:
            with Publisher(self.ledger, self.storage, run="run", settings=RUN) as publisher:
                version = publisher.publish(adapter).version
        place = self.root / "storage" / policy_name(DEFAULT_LINE, version)
        self.originals[version] = adapter
        self.hashes[version] = hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()
        self.kinds[version] = kind
        self.born_at_death[version] = {name: e.deaths for name, e in self.engines.items()}
        if kind == "corrupt":
            content = bytearray((place / WEIGHTS).read_bytes())
            content[-1] ^= 0xFF
            (place / WEIGHTS).write_bytes(content)
        elif kind == "missing":
            (place / WEIGHTS).unlink()
        return version

    def _publish_unchecked(self, adapter: Path) -> int:
        """As a publisher would that checks nothing."""
        claim = self.ledger.open_run("run", settings=RUN)
        reservation = self.ledger.reserve(claim)
        place = self.root / "storage" / policy_name(DEFAULT_LINE, reservation.version)
        shutil.copytree(adapter, place)
        files = tuple(
            FileEntry(
                path=file.name,
                size_bytes=file.stat().st_size,
                sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
            )
            for file in sorted(place.iterdir())
        )
        manifest = Manifest(
            line=claim.line,
            run=claim.run,
            version=reservation.version,
            epoch=reservation.epoch,
            attempt=reservation.attempt,
            digest=version_digest(files),
            files=files,
            anchor=reservation.anchor,
            metadata={},
        )
        self.ledger.publish(claim, manifest)
        self.ledger.release(claim)
        return reservation.version

    def view(self) -> LineSnapshot:
        """The ledger's view with every version."""
        return self.ledger.view(DEFAULT_LINE, also=tuple(self.kinds))

    def note_theft(self, replica: str, name: str) -> None:
        """Somebody unloaded a name; the present watcher has not seen it, the next one must.

        One that is about to join and has looked already is the present one.
        """
        row, watcher = self.view().replicas.get(replica), self.watchers.get(replica)
        joins = watcher is not None and watcher.generation is None and watcher.looked
        self.stolen[replica, name] = (0 if row is None else row.generation) + joins

    # --- what a watcher does, at the moment it does it

    def _asking(self, watcher: Watcher, request: httpx.Request) -> None:
        path = request.url.path.rstrip("/")
        if path in {"/metrics", "/v1/models"}:
            watcher.reads[path] = False
        if path != "/v1/unload_lora_adapter":
            return
        name = json.loads(request.content)["lora_name"]
        request.extensions["asked_by"] = watcher.generation
        service = self.engines[watcher.replica].service
        adapter = None if service is None else service.registry.get(name)
        ours = adapter is not None and adapter.path.startswith(str(watcher.cache) + "/")
        if not watcher.looked:
            self.violations.append(f"I10: {watcher.replica} unloads {name} after a failed read")
        if ours and watcher.wants(name):
            self.violations.append(f"I3: {watcher.replica} unloads {name}, which is desired")

    def _done(self, replica: str, request: httpx.Request) -> None:
        """An unload that was on its way when its watcher was replaced is one behind the successor's
        back: the ledger fences watchers, and no engine does."""
        row = self.view().replicas.get(replica)
        asked_by = request.extensions.get("asked_by")
        if asked_by is not None and row is not None and asked_by < row.generation:
            self.note_theft(replica, json.loads(request.content)["lora_name"])

    def _answered(
        self, watcher: Watcher, request: httpx.Request, answer: httpx.Response | None
    ) -> None:
        path = request.url.path.rstrip("/")
        if path in {"/metrics", "/v1/models"}:
            watcher.reads[path] = answer is not None and answer.status_code == 200

    def removing(self, path: Path) -> None:
        """A local copy is about to disappear."""
        for watcher in self.watchers.values():
            if path.is_relative_to(watcher.cache):
                self._check_removal(watcher, path)

    def _check_removal(self, watcher: Watcher, path: Path) -> None:
        name = path.name.rpartition("-")[0]
        process = self.engines[watcher.replica]
        shown = f"{watcher.replica} deletes the files of {name}"
        if not watcher.looked:
            self.violations.append(f"I10: {shown} after a failed read")
        if watcher.wants(name):
            self.violations.append(f"I3: {shown}, which is desired")
        listed = process.service.registry if process.service is not None else {}
        if name in listed and listed[name].path == str(path):
            self.violations.append(f"I3: {shown}, which the engine lists")
        if name in process.busy():
            self.violations.append(f"I3: {shown}, on which a request runs")

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
        for event in self.ledger.events(after=self._recorded[0]):
            if event.recorded_at < self._recorded[1]:
                self.violations.append(f"event {event.seq} is older than its predecessor")
            self._recorded = (event.seq, event.recorded_at)
        view = self.view()
        for replica, process in self.engines.items():
            service = process.service
            if service is None:
                continue
            listed = {name: adapter.path for name, adapter in service.registry.items()}
            for name, path in listed.items():
                version = parse_policy_name(DEFAULT_LINE, name)
                assert version is not None
                if self.hash_of(Path(path) / WEIGHTS) != self.hashes[version]:
                    self.violations.append(f"I3: {replica} lists {name}; its files are not there")
            if view.replicas.get(replica) is None:
                continue
            if view.replicas[replica].incarnation != process.incarnation:
                continue
            self._check_acks(replica, view, listed)

    def _check_acks(self, replica: str, view: LineSnapshot, listed: Collection[str]) -> None:
        for version in self.kinds:
            name = policy_name(DEFAULT_LINE, version)
            if name in listed:
                self.stolen.pop((replica, name), None)
            elif (
                replica in view.acked_by(version)
                and self.stolen.get((replica, name)) != view.replicas[replica].generation
            ):
                self.violations.append(f"I2: {replica} acked {name} and does not list it")

    def fair_weather(self) -> None:
        """Every fault stops."""
        self.weather.ledger = ""
        self.weather.storage_fails = self.weather.storage_stalls = 0
        self.weather.let_the_stalled_go_on()
        for watcher in self.watchers.values():
            watcher.lifeline.end_after(None)
        for process in self.engines.values():
            process.faults.clear()
        for version, kind in self.kinds.items():
            if kind == "missing":
                place = self.root / "storage" / policy_name(DEFAULT_LINE, version)
                shutil.copy(self.originals[version] / WEIGHTS, place / WEIGHTS)

    def unserved(self) -> list[str]:
        """What is desired and not served, by replica; empty when all is as it should be."""
        view = self.view()
        missing = [f"v{view.candidate} is still candidate"] if view.candidate is not None else []
        for replica in REPLICAS:
            reported = {v: r.state for (who, v), r in view.residency.items() if who == replica}
            wanted = [d.version for d in view.desired if reported.get(d.version) != "rejected"]
            service = self.engines[replica].service
            listed = {} if service is None else service.registry
            missing += [
                f"{replica}: v{v} ({reported.get(v)})"
                for v in wanted[:SLOTS]
                if replica not in view.acked_by(v) or policy_name(DEFAULT_LINE, v) not in listed
            ]
        return missing


class _Witness:
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
        if adapter is None and (self._replica, name) not in world.stolen:
            world.violations.append(f"{shown}, which the engine does not list")
        if adapter is None:
            return
        if not adapter.path.startswith(str(self.watcher.cache) + "/"):
            world.violations.append(f"{shown}, which the engine has from {adapter.path}")
        elif world.hash_of(Path(adapter.path) / WEIGHTS) != world.hashes[version]:
            world.violations.append(f"{shown}, whose bytes are not the published ones")

    def spoke(self) -> None:
        """I2, when acks of a former life may have come into force again."""
        self._world.check()

    def beaten(self, generation: int) -> None:
        """A heartbeat has moved."""
        self._world.beaten_s[self._replica, generation] = self._world.loop.time()

    def declared_lost(self, replica: str, generation: int) -> None:
        """Whatever the wall clocks show: only after a heartbeat stood for the TTL."""
        still_s = self._world.loop.time() - self._world.beaten_s.get((replica, generation), 0.0)
        if still_s < TTL_S:
            self._world.violations.append(
                f"{self._replica} declares {replica} lost, which beat {still_s:g} s ago"
            )

    def rejected(self, version: int, reason: str) -> None:
        """I9: nothing good is given up, but for a version during which the engine died twice."""
        world = self._world
        deaths = world.engines[self._replica].deaths - world.born_at_death[version][self._replica]
        if world.kinds[version] in {"good", "missing"} and deaths < 2:
            world.violations.append(f"I9: {self._replica} rejects good v{version}: {reason}")


def _cancel_soon(loop: VirtualLoop, task: asyncio.Task[None]) -> None:
    loop.call_soon_threadsafe(task.cancel)


@functools.cache
def _adapter(seed: int, *, refused: bool) -> Path:
    """An adapter; `refused` claims a rank above the engine's, and only that."""
    root = Path(tempfile.mkdtemp(prefix="policyline-sim-"))
    return write_files(root, adapter_config(16 if refused else 1), adapter_tensors(seed))


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """The watcher's cache deletes by a rename into its trash."""
    if event == "os.rename" and _present and "/.trash-" in str(arguments[1]):
        _present[-1].removing(Path(str(arguments[0])))


sys.addaudithook(_audit)
