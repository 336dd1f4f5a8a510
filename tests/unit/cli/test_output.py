"""What came from anywhere is shown, and steers no terminal."""

import logging

import pytest

from policyline.cli.doctor import _text
from policyline.cli.logs import TextFormatter
from policyline.cli.output import fields_text, print_line, print_table, visible
from policyline.doctor.model import Line

HOSTILE = "\x1b[2J\x1b]0;pwn\x07 [red]x[/] [/nothing] \u202eabc\udcf5"
SHOWN = r"\x1b[2J\x1b]0;pwn\x07 [red]x[/] [/nothing] \u202eabc\udcf5"


def test_control_characters_are_spelt_out() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("épisode 1 · 一") == "épisode 1 · 一"


def test_no_way_to_stdout_lets_them_through(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("episode",), [(HOSTILE,)])
    print_line(HOSTILE)
    shown = capsys.readouterr().out + fields_text({"episode": HOSTILE})

    assert shown.count(SHOWN) == 3
    assert not set(shown) & set("\x1b\x07\u202e")


def test_no_log_line_lets_them_through() -> None:
    error = ValueError(HOSTILE)
    told = (type(error), error, None)
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s", (HOSTILE,), told)
    shown = TextFormatter().format(record)

    assert shown.count(SHOWN) == 2
    assert not set(shown) & set("\x1b\x07\u202e")
    assert len(shown.splitlines()) == 2


def test_a_measurement_is_one_line() -> None:
    shown = _text(Line("fail", "ledger.reachable", f"refused\n\tby {HOSTILE}", "start it"), 20)

    assert shown.plain == f"fail  ledger.reachable      refused by {SHOWN}  -> start it"
