"""The whole Postgres server goes away under live ledgers, and comes back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

import pytest

from policyline.ledger import Ledger
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.read.verify import verify
from tests.ledger_builders import FACTS, LINE
from tests.postgres import PostgresServer

WITHIN_S = 30.0


class Wakes:
    """A reader that waits for signals, as daemons do."""

    def __init__(self, url: str) -> None:
        self.seen: queue.Queue[None] = queue.Queue()
        self._ledger = Ledger(url)
        self._follower = self._ledger.follow(poll_s=None)
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        for _ in self._follower:
            self.seen.put(None)

    def expect(self) -> None:
        self.seen.get(timeout=WITHIN_S)

    def drain(self) -> None:
        while not self.seen.empty():
            self.seen.get()

    def end(self) -> None:
        self._follower.close()
        self.thread.join(WITHIN_S)
        assert not self.thread.is_alive()
        self._ledger.close()


def test_a_listener_survives_the_loss_of_its_server(
    own_server: PostgresServer, own_url: str
) -> None:
    """News may have been missed while nobody listened, so that a new connection is a wake too."""
    with Ledger(own_url) as ledger:
        claim = ledger.open_run("r1")
        wakes = Wakes(own_url)
        try:
            wakes.expect()
            own_server.stop()
            wakes.drain()
            own_server.start_again()
            wakes.expect()
            wakes.drain()
            ledger.reserve(claim)
            wakes.expect()
        finally:
            wakes.end()


def test_while_the_server_is_away_every_verb_says_so(
    own_server: PostgresServer, own_url: str
) -> None:
    with Ledger(own_url) as ledger:
        claim = ledger.open_run("r1")
        member = ledger.join(LINE, "r0", FACTS)
        verbs: list[Callable[[], object]] = [
            lambda: ledger.reserve(claim),
            lambda: ledger.view(LINE),
            lambda: ledger.beat(member, 1),
            lambda: list(ledger.events()),
            lambda: verify(ledger),
            lambda: Ledger(own_url),
        ]
        own_server.stop()
        try:
            for verb in verbs:
                with pytest.raises(LedgerUnavailable, match="check that it is running"):
                    verb()
        finally:
            own_server.start_again()
        for verb in verbs[:-1]:
            verb()


class Persistent:
    """Does things as daemons do: again and again until the ledger is there."""

    def __init__(self, url: str, work: Callable[[Persistent, Ledger], None]) -> None:
        self.done = threading.Event()
        self.failures = 0
        self.progress = 0
        self._url = url
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Ledger(self._url) as ledger:
            self._work(self, ledger)

    def persist(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
            except LedgerUnavailable:
                self.failures += 1
                self.done.wait(0.02)
            else:
                return

    def until(self, progress: int) -> None:
        """Wait until it has got so far."""
        pause = threading.Event()
        for _ in range(int(WITHIN_S / 0.01)):
            if self.progress >= progress:
                return
            pause.wait(0.01)
        raise TimeoutError(f"{self.progress} of {progress}")

    def end(self) -> None:
        self.done.set()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()


def test_writers_and_readers_carry_on_when_the_server_restarts(
    own_server: PostgresServer, own_url: str
) -> None:
    seqs: list[int] = []

    def write(me: Persistent, ledger: Ledger) -> None:
        while not me.done.is_set():
            me.persist(partial(ledger.reserve, claim, attempt=f"a{me.progress}"))
            me.progress += 1

    def follow(me: Persistent, ledger: Ledger) -> None:
        def take() -> None:
            for event in ledger.events(after=len(seqs)):
                seqs.append(event.seq)
                me.progress = event.seq

        for _ in ledger.follow(poll_s=1.0):
            me.persist(take)
            if me.done.is_set():
                break
        me.persist(take)

    with Ledger(own_url) as ledger:
        claim = ledger.open_run("r1")
        writer, reader = Persistent(own_url, write), Persistent(own_url, follow)
        try:
            for _ in range(3):
                target = writer.progress + 40
                writer.until(target)
                reader.until(target)
                own_server.restart()
            writer.until(writer.progress + 1)
        finally:
            writer.end()
            reader.end()
        assert writer.failures > 0
        events = list(ledger.events())
        assert seqs == [e.seq for e in events] == list(range(1, len(events) + 1))
        assert [e.data["attempt"] for e in events[1:]] == [f"a{n}" for n in range(writer.progress)]
        assert [e.version for e in events[1:]] == list(range(1, writer.progress + 1))
        assert verify(ledger).problems == ()
