"""`policyline ledger ...` as processes, and what is expected of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from policyline.ledger import Ledger
from policyline.ledger.read.verify import verify
from tests.forking import Commands, Done
from tests.integration.ledger.test_queries import live, rollout
from tests.ledger_builders import LINE

NOBODY = 65534


class Command:
    """`policyline ledger ...`, with the ledger from the environment."""

    def __init__(self, forking: Commands) -> None:
        self._forking = forking

    def __call__(self, url: str, *args: str, **options: Any) -> Done:
        return self.all(url, [" ".join(args)], **options)[" ".join(args)]

    def all(
        self,
        url: str,
        many: Iterable[str],
        env: Mapping[str, str] | None = None,
        user: int | None = None,
    ) -> dict[str, Done]:
        """Several commands side by side; words are separated by blanks."""
        words = {text: ["ledger", *text.split()] for text in many}
        done = self._forking.run_all(
            list(words.values()), env={"POLICYLINE_LEDGER": url, **(env or {})}, user=user
        )
        return dict(zip(words, done, strict=True))


def expect(done: Done, code: int, *parts: str) -> None:
    """One line on stderr, the code, and nothing on stdout."""
    told = f"{done.args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, told
    assert "Traceback" not in done.stderr, told
    one_line = done.stderr.startswith("policyline: ") and done.stderr.count("\n") == 1
    assert one_line or (code == 2 and done.stderr.startswith("Usage: ")), told
    said = " ".join(done.stderr.replace("│", " ").split())
    for part in parts:
        assert part in said, told


class MakeUrl(Protocol):
    def __call__(self) -> str: ...


def fill(url: str) -> None:
    with Ledger(url, actor="tester@here:1") as ledger:
        live(ledger, 8)
        ledger.record_rollouts(LINE, "b1", [rollout(1, 1), rollout(2, 8)])
        ledger.release(ledger.open_run("r1", take_over=True))


def head_of(url: str) -> int:
    with Ledger(url) as ledger:
        assert verify(ledger).problems == ()
        return ledger.head()[0]
