"""What a watcher's life hangs on: it can be made to end at any of its effects on the outside."""

from __future__ import annotations

from collections.abc import Callable

import httpx


class Killed(BaseException):
    """The process of the watcher is gone: nothing it goes on to do has an effect."""


class Lifeline:
    """Counts effects, and ends the life at a scripted one; no effect comes after that.

    An effect is a request to the engine, a transaction of the ledger, a copy from storage: each
    counts before and after it is done.
    """

    def __init__(self) -> None:
        self.dead = False
        self.died_at = ""
        self.seen: Callable[[str], None] = lambda _what: None
        self.asking: Callable[[httpx.Request], None] = lambda _request: None
        self.answered: Callable[[httpx.Request, httpx.Response | None], None] = lambda _r, _a: None
        self.on_death: Callable[[], None] = lambda: None
        self._left: int | None = None

    def end_after(self, effects: int | None) -> None:
        """End the life at the `effects`-th effect from now on; None: not any more."""
        self._left = effects

    def end(self) -> None:
        """End the life now."""
        if not self.dead:
            self.dead = True
            self.on_death()

    def effect(self, what: str) -> None:
        """Something is about to be done, or was just done.

        Raises:
            Killed: the life has ended.
        """
        if not self.dead:
            self.seen(what)
        if self._left is not None and not self.dead:
            self._left -= 1
            if self._left <= 0:
                self.died_at = what
                self.end()
        if self.dead:
            raise Killed(what)
