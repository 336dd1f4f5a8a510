"""Shows progress: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


class Progress:
    """Steps, each with its duration, on stderr.

    Args:
        console: where to; it decides about colours and whether there is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """Show `what` while the block runs, and how long it took."""
        begun = time.monotonic()
        step = Step(self._console, what)
        if self._console.is_terminal:
            with step.status:
                yield step
        else:
            self._console.print(f"… {what}", markup=False, highlight=False)
            yield step
        elapsed_s = time.monotonic() - begun
        self._console.print(f"[green]✓[/green] {escape(step.text)} [dim]({elapsed_s:.1f} s)[/dim]")


class Step:
    """A step in progress."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self.status = console.status(escape(text))
        self.text = text

    def update(self, text: str) -> None:
        """Change what is shown."""
        self.text = text
        if self._console.is_terminal:
            self.status.update(escape(text))
        else:
            self._console.print(f"  {text}", markup=False, highlight=False)
