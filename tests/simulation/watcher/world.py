"""Two replicas, one ledger, one storage, and the truth about all of them.

Everything of the product is the real thing but the clock; what is checked is what the engine and
the disks hold, not what a watcher believes.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.errors import ReplicaTakenOver
from tests.simulation.watcher.bus import LISTENER, Bus
from tests.simulation.watcher.clock import VirtualLoop
from tests.simulation.watcher.faulty import (
    COPIER,
    SimulatedLedger,
    SimulatedStorage,
    Weather,
    clock_from,
)
from tests.simulation.watcher.invariants import Invariants, LedgerWitness
from tests.simulation.watcher.lifeline import Killed, Lifeline
from tests.simulation.watcher.process import EngineProcess, SimulatedClient
from tests.simulation.watcher.settings import (
    FETCH_TIMEOUT_S,
    GRACE_S,
    LINGER_S,
    POLL_S,
    REPLICAS,
    SLOTS,
    STEP_S,
    STOP_TIMEOUT_S,
    TRAINER,
    TTL_S,
)
from tests.simulation.watcher.trainer import Kind, Trainer
from tests.simulation.watcher.watchers import Watcher

T = TypeVar("T")
_clients: list[SimulatedClient] = []
_present: list[World] = []


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
        self.ledger = self._open_ledger(TRAINER, Lifeline(), Weather(self.loop.turns))
        self.trainer = Trainer(self.ledger, root / "storage")
        self.invariants = Invariants(self)
        options = ServiceOptions(EngineOptions(max_loras=SLOTS), step_delay_s=STEP_S)
        self.engines = {name: EngineProcess(options, self.violations.append) for name in REPLICAS}
        for name, process in self.engines.items():
            process.done = functools.partial(self.invariants.done, name)
        self.watchers: dict[str, Watcher] = {}
        self.lives = 0
        """Of watchers, so far."""
        self.wall_off_s = dict.fromkeys((TRAINER, *REPLICAS), 0.0)
        """How wrong the wall clock of each host is."""
        self.second: set[str] = set()
        """Replicas whose present watcher has the other cache."""
        self.born_at_death: dict[int, dict[str, int]] = {}
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
        self, host: str, lifeline: Lifeline, weather: Weather, witness: LedgerWitness | None = None
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
            witness = LedgerWitness(self, replica)
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
            lifeline.asking = functools.partial(self.invariants.asking, watcher)
            lifeline.answered = functools.partial(self.invariants.answered, watcher)
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
        version = self.trainer.publish(kind)
        self.born_at_death[version] = {name: e.deaths for name, e in self.engines.items()}
        return version

    def view(self) -> LineSnapshot:
        """The ledger's view with every version."""
        return self.ledger.view(DEFAULT_LINE, also=tuple(self.trainer.kinds))

    def fair_weather(self) -> None:
        """Every fault stops."""
        self.weather.ledger = ""
        self.weather.storage_fails = self.weather.storage_stalls = 0
        self.weather.let_the_stalled_go_on()
        for watcher in self.watchers.values():
            watcher.lifeline.end_after(None)
        for process in self.engines.values():
            process.faults.clear()
        self.trainer.restore_missing()


def _cancel_soon(loop: VirtualLoop, task: asyncio.Task[None]) -> None:
    loop.call_soon_threadsafe(task.cancel)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """The watcher's cache deletes by a rename into its trash."""
    if event == "os.rename" and _present and "/.trash-" in str(arguments[1]):
        _present[-1].invariants.removing(Path(str(arguments[0])))


sys.addaudithook(_audit)
