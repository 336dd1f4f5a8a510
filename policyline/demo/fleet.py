"""The demo's processes: engines and sidecars, started side by side and all of them stopped."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from policyline.demo.errors import DemoError
from policyline.demo.settings import DemoSettings, EngineKind
from policyline.engines.child import ChildServer
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.engines.vllm import VllmOptions, VllmServer
from policyline.ledger import Ledger
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError, EngineUnreachable

MARK: Final = "POLICYLINE_DEMO"
"""Environment variable that every child inherits: what still has it afterwards is an orphan."""

BASE_NAME: Final = "tiny"
PROMPT: Final = tuple(range(40, 64))
"""A prompt of 24 token ids, known to both engines' vocabularies of 512."""

ENGINE_START_S = 300.0
"""vLLM takes about 30 s, several times that with other work on two cores."""
HELPER_S = 180.0
"""Importing torch takes up to 20 s on a cold disk; the work itself a second."""
JOIN_S = 60.0
SIM_STEP_S = 0.002
_POLL_S = 0.05


class Fleet:
    """Starts the processes; `stop` (or leaving the `with`) ends them, whatever happened.

    Args:
        settings: of the demo.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self.mark = uuid.uuid4().hex
        self.engines: dict[str, ChildServer] = {}
        self.sidecars: dict[str, ChildServer] = {}
        self._stopping = threading.Lock()

    def __enter__(self) -> Self:
        os.environ[MARK] = self.mark
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            os.environ.pop(MARK, None)

    def stop(self) -> None:
        """Stop the sidecars, which leave the ledger, then the engines. Idempotent, thread-safe."""
        with self._stopping:
            _stop_all(self.sidecars.values())
            _stop_all(self.engines.values())

    def start_engines(self) -> None:
        """Start one engine for each replica; they are not ready yet."""
        for replica in self.settings.replica_names:
            engine = _engine(self.settings, replica)
            self.engines[replica] = engine
            engine.start()

    async def wait_engines(self, stack: AsyncExitStack) -> dict[str, EngineClient]:
        """Wait until every engine has answered; return a client for each.

        The first request of a vLLM server compiles for up to 20 s: it is made here, so that no
        version waits for it.

        Raises:
            DemoError: an engine has ended, or took too long.
        """
        clients = {
            replica: await stack.enter_async_context(EngineClient(engine.url))
            for replica, engine in self.engines.items()
        }
        await asyncio.gather(*(self._warm_up(r, client) for r, client in clients.items()))
        return clients

    async def _warm_up(self, replica: str, client: EngineClient) -> None:
        engine = self.engines[replica]

        async def answers() -> bool:
            try:
                await client.models()
            except EngineUnreachable:
                return False
            return True

        await wait_for(answers, engine, f"engine of {replica}", ENGINE_START_S)
        try:
            await client.complete(BASE_NAME, PROMPT, 4)
            await client.score(BASE_NAME, PROMPT)
        except EngineError as error:
            raise DemoError(f"engine of {replica} does not answer: {error}") from error

    async def start_sidecars(self, ledger: Ledger) -> None:
        """Start a sidecar for each engine and wait until all have joined the ledger.

        Raises:
            DemoError: a sidecar has ended, or took too long.
        """
        for replica, engine in self.engines.items():
            sidecar = sidecar_child(self.settings, replica, engine.url)
            self.sidecars[replica] = sidecar
            sidecar.start()

        for replica, sidecar in self.sidecars.items():
            joined = partial(asyncio.to_thread, _has_joined, ledger, self.settings.line, replica)
            await wait_for(joined, sidecar, f"sidecar of {replica}", JOIN_S)

    def check_alive(self) -> None:
        """Require that nothing has ended by itself.

        Raises:
            DemoError: naming the process and its log.
        """
        for what, children in (("engine", self.engines), ("sidecar", self.sidecars)):
            for replica, child in children.items():
                _require_alive(child, f"{what} of {replica}")


async def wait_for(
    condition: Callable[[], Awaitable[bool]], child: ChildServer, what: str, timeout_s: float
) -> None:
    """Poll `condition` until it holds.

    Raises:
        DemoError: `child` has ended, or `timeout_s` has passed.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        _require_alive(child, what)
        if asyncio.get_running_loop().time() > deadline:
            raise DemoError(
                f"{what} was not ready within {timeout_s:g} s", hint=f"see {child.log_path}"
            )
        await asyncio.sleep(_POLL_S)


async def run_to_end(command: Sequence[str], log_path: Path, what: str) -> None:
    """Run a helper process to its end; it is stopped when this call is cancelled.

    Raises:
        DemoError: it failed, with the last line it wrote; or it took longer than `HELPER_S`.
    """
    deadline = asyncio.get_running_loop().time() + HELPER_S
    with ChildServer(command, log_path=log_path) as child:
        while child.exit_status is None:
            if asyncio.get_running_loop().time() > deadline:
                raise DemoError(f"{what} took longer than {HELPER_S:g} s", hint=f"see {log_path}")
            await asyncio.sleep(_POLL_S)
        if child.exit_status:
            raise DemoError(f"{what} failed: {_last_line(log_path)}", hint=f"see {log_path}")


def orphans(mark: str) -> list[str]:
    """Processes of this machine that carry `mark`, as `pid command`. Linux; elsewhere none.

    It searches for the mark that every child inherits, not at what the fleet believes it started.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found.append(f"{folder.name} {command:.80}")
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    return found


def _engine(settings: DemoSettings, replica: str) -> ChildServer:
    log_path = settings.logs / f"engine-{replica}.log"
    if settings.engine is EngineKind.VLLM:
        options = VllmOptions(served_model_name=BASE_NAME, max_loras=settings.max_loras)
        return VllmServer(settings.model, options, log_path=log_path)
    service = ServiceOptions(
        engine=EngineOptions(max_loras=settings.max_loras),
        served_model_name=BASE_NAME,
        step_delay_s=SIM_STEP_S,
    )
    return SimulatedChild(service, log_path=log_path)


def sidecar_child(settings: DemoSettings, replica: str, engine_url: str) -> ChildServer:
    """The sidecar of one replica as a child process, not started yet."""
    command = [sys.executable, "-m", "policyline", "sidecar"]
    command += ["--vllm", engine_url, "--line", settings.line, "--replica", replica]
    command += ["--ledger", str(settings.ledger), "--storage", str(settings.storage)]
    command += ["--cache", str(settings.cache(replica)), "--listen", "127.0.0.1:{port}"]
    return ChildServer(command, log_path=settings.logs / f"sidecar-{replica}.log")


def _has_joined(ledger: Ledger, line: str, replica: str) -> bool:
    rows = ledger.replicas(line)
    return any(row.replica == replica and row.state == "joined" for row in rows)


def _stop_all(children: Iterable[ChildServer]) -> None:
    """Stop them side by side: vLLM takes some seconds to end."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda child: child.stop(), children):
            pass


def _require_alive(child: ChildServer, what: str) -> None:
    if child.exit_status is not None:
        raise DemoError(
            f"{what} ended with status {child.exit_status}: {_last_line(child.log_path)}",
            hint=f"see {child.log_path}",
        )


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")
