"""A server as a child process: start, wait for its health, stop, kill; nothing left behind."""

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_GUARD = Path(__file__).with_name("guard.py")
_LOG_TAIL_LINES = 20
_POLL_S = 0.05


class EngineStartFailed(Exception):
    """The server did not become healthy.

    Attributes:
        log_path: the server's whole output.
    """

    def __init__(self, message: str, log_path: Path) -> None:
        self.log_path = log_path
        super().__init__(f"{message}; the end of {log_path}:\n{_tail(log_path)}")


class ChildServer:
    """A server in a process group of its own, on a port of 127.0.0.1.

    The group dies with this process, however this one ends. `stop` and `kill` end it at once.
    Use it as `with ChildServer(...) as server: server.wait_healthy(120)`.

    Args:
        command: program and arguments; `{port}` in an argument is replaced.
        environment: added to this process's own.
        port: 0 for a free one, which is kept over `restart`.
        log_path: where output goes, appended; None for a temporary file, removed by `stop`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        log_path: Path | None = None,
    ) -> None:
        self.port = port or free_port()
        self._scratch = None if log_path else Path(tempfile.mkdtemp(prefix="policyline-engine-"))
        self.log_path = log_path or Path(str(self._scratch)) / "log"
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process group of the server; its first process is the guard."""
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status once it has ended; negative for a signal."""
        return None if self._process is None else self._process.poll()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server; it may take long until it is healthy."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                [sys.executable, "-I", "-S", str(_GUARD), *self._command],
                env={**os.environ, **self._environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_healthy(self, timeout_s: float) -> None:
        """Return once GET /health answers 200.

        Raises:
            EngineStartFailed: it has ended, or `timeout_s` has passed; the log's end is shown.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            status = self.exit_status
            if status is not None:
                raise EngineStartFailed(f"the server ended with status {status}", self.log_path)
            if time.monotonic() > deadline:
                message = f"the server was not healthy within {timeout_s:g} s"
                raise EngineStartFailed(message, self.log_path)
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the group: SIGTERM, and after `timeout_s` SIGKILL, as vLLM can ignore the former."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.terminate(timeout_s)
            self.kill()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def terminate(self, timeout_s: float) -> int:
        """Send SIGTERM, wait for the end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        assert self._process is not None
        self._signal(signal.SIGTERM)
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End the group by SIGKILL."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None

    def restart(self) -> None:
        """Kill it and start it again on the same port."""
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"({error})"
    return "\n".join(lines[-_LOG_TAIL_LINES:]) or "(empty)"
