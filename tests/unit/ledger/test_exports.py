"""What `policyline.ledger` offers by name, each imported at its first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from policyline import ledger


@pytest.mark.parametrize("name", ledger.__all__)
def test_everything_it_names_is_there(name: str) -> None:
    assert callable(getattr(ledger, name))
    assert name in dir(ledger)


def test_what_it_does_not_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = ledger.nothing_like_it


def test_the_vocabulary_is_imported_without_a_database_library() -> None:
    program = (
        "import sys, policyline.ledger.manifest, policyline.ledger.line_snapshot\n"
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
