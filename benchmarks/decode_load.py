"""Steady decoding on servers from a process of its own, under a version that can be changed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

IN_FLIGHT = 2
"""Requests at any time for each server."""
MAX_TOKENS = 48
PROMPT = list(range(40, 64))


@dataclass(frozen=True, slots=True)
class DecodeCounts:
    """What was generated while it ran."""

    tokens: int
    failures: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, over all servers."""
        return self.tokens / self.seconds


@dataclass
class DecodeLoad:
    """Use as `with DecodeLoad(urls, line) as load: ... load.taken()`.

    Args:
        urls: where requests go, each the same number.
        line: prefix of the versions' names.
        servers: how many servers there are behind the URLs.
        period_s: from one request of a client to its next, if it is answered by then.
    """

    urls: list[str]
    line: str
    servers: int
    period_s: float = 0.0
    _context: Any = field(default_factory=lambda: mp.get_context("spawn"))

    def __enter__(self) -> Self:
        self._version = self._context.Value("i", 0)
        self._tokens = self._context.Value("q", 0)
        self._failures = self._context.Value("q", 0)
        self._stop = self._context.Event()
        self._process = self._context.Process(target=_run, args=(self._arguments(),), daemon=True)
        self._process.start()
        return self

    def _arguments(self) -> tuple[Any, ...]:
        shared = (self._version, self._tokens, self._failures, self._stop)
        return (self.urls, self.line, self.servers, self.period_s, shared)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()

    def name(self, version: int) -> None:
        """Ask for this version from now on."""
        self._version.value = version

    def begin(self) -> None:
        """Count from here."""
        self._before = (self._tokens.value, self._failures.value, time.perf_counter())

    def taken(self) -> DecodeCounts:
        """What was generated since `begin`."""
        tokens, failures, since = self._before
        return DecodeCounts(
            self._tokens.value - tokens,
            self._failures.value - failures,
            time.perf_counter() - since,
        )

    def wait_busy(self, timeout_s: float = 60.0) -> None:
        """Return once the first request was answered."""
        deadline = time.monotonic() + timeout_s
        while self._tokens.value == 0:
            if time.monotonic() > deadline:
                raise TimeoutError("no request was answered")
            time.sleep(0.05)


def _run(arguments: tuple[Any, ...]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_decode(*arguments))


async def _decode(
    urls: list[str],
    line: str,
    servers: int,
    period_s: float,
    shared: tuple[Any, Any, Any, Any],
) -> None:
    version, tokens, failures, stop = shared
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def one(url: str) -> None:
            while not stop.is_set():
                if not version.value:
                    await asyncio.sleep(0.02)
                    continue
                ask = {
                    "model": f"{line}-v{version.value}",
                    "prompt": PROMPT,
                    "max_tokens": MAX_TOKENS,
                    "ignore_eos": True,
                }
                due = time.perf_counter() + period_s
                answer = await client.post(f"{url}/v1/completions", json=ask)
                if answer.status_code == 200:
                    tokens.value += answer.json()["usage"]["completion_tokens"]
                else:
                    failures.value += 1
                    await asyncio.sleep(0.05)
                await asyncio.sleep(due - time.perf_counter())

        count = IN_FLIGHT * servers // len(urls)
        await asyncio.gather(*(one(url) for url in urls for _ in range(count)))
