"""What came from anywhere is shown, and steers no terminal."""

import pytest

from policyline.cli.output import fields_text, print_line, print_table, visible

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
