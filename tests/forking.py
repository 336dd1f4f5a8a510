"""The command in many processes, of which only the first has to import everything.

A server that has imported `policyline` forks for each command: a process of its own with its own
arguments, environment, user and exit code, in a twentieth of the time.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SERVER = """
import json, os, sys, traceback
import policyline.cli.app, sqlalchemy.dialects.postgresql.psycopg, alembic.command, numpy
import policyline.doctor, policyline.watcher
from policyline.cli import main

def run(request):
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_RDWR), number)
    if request["user"] is not None:
        os.setgroups([]); os.setgid(request["user"]); os.setuid(request["user"])
    os.environ.update(request["env"])
    sys.argv = ["policyline", *request["args"]]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(code)

def warm_up():
    "Import what is only imported when a command runs."
    for args in (["ledger", "status", "--ledger", "/nowhere/x.db"], ["ledger", "nonsense"]):
        sys.argv = ["policyline", *args]
        try:
            main()
        except SystemExit:
            pass

with open(os.devnull, "w") as nowhere:
    sys.stderr, told = nowhere, sys.stderr
    warm_up()
    sys.stderr = told
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    args: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


class Commands:
    """Runs commands, several at once."""

    def __init__(self, servers: Sequence[subprocess.Popen[str]]) -> None:
        self._idle: queue.Queue[subprocess.Popen[str]] = queue.Queue()
        for server in servers:
            self._idle.put(server)
        self._pool = ThreadPoolExecutor(len(servers))

    def run(
        self, *args: str, env: Mapping[str, str] | None = None, user: int | None = None
    ) -> Done:
        """One command; `user` is the uid it runs as."""
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            request = {"args": args, "env": dict(env or {}), "user": user}
            code = self._ask({**request, "out": out.name, "err": err.name})
            return Done(args, code, out.read().decode(), err.read().decode())

    def run_all(self, many: Sequence[Sequence[str]], **options: Any) -> list[Done]:
        """Several, side by side."""
        return list(self._pool.map(lambda args: self.run(*args, **options), many))

    def _ask(self, request: dict[str, Any]) -> int:
        server = self._idle.get()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())
        finally:
            self._idle.put(server)


@contextmanager
def commands(servers: int = 2) -> Iterator[Commands]:
    """Start the servers; end them afterwards."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("POLICYLINE_")},
        )
        for _ in range(servers)
    ]
    try:
        yield Commands(running)
    finally:
        for server in running:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.close()
            server.wait(10)
            server.stdout.close()
