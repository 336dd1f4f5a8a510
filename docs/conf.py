"""How Sphinx builds the site from README.md, docs/, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md.

    make docs        # strict: a warning fails; fetches nothing

The source directory is the repository's root, so that the same relative links work in the site and
where the repository is browsed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.ext.napoleon import GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "policyline"
author = "the policyline authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
exclude_patterns = [".*", "build", "tests"]
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md"]

NAVIGATION = {
    "Start": ["docs/quickstart-trl", "docs/concepts", "docs/commands"],
    "Run it": ["docs/router", "docs/metrics", "docs/ledger", "docs/postgres", "docs/backup"],
    "Know it": ["docs/architecture", "docs/engine", "docs/benchmarks", "docs/limits", "docs/api"],
    "Carry on": ["CONTRIBUTING", "SECURITY", "CHANGELOG", "docs/decisions/README"],
}

myst_heading_anchors = 3

autodoc_mock_imports = [
    "accelerate",
    "peft",
    "torch",
    "transformers",
    "trl",
]  # `make check` has none of them
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
default_role = "code"  # `name` in a docstring is code, as in Markdown

html_theme = "furo"
html_title = "policyline"
html_show_sourcelink = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Give the site its navigation, docstrings, and an index.html to begin at."""
    app.connect("source-read", _add_navigation)
    app.connect("autodoc-process-docstring", _read_google_style)
    app.connect("build-finished", _write_index)


def _read_google_style(
    _app: Sphinx, what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """As Sphinx's napoleon, which would take text before a field's colon for its type."""
    if what != "attribute":
        lines[:] = GoogleDocstring(lines, what=what).lines()


def _add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add what only Sphinx understands here, so that the pages stay plain Markdown."""
    if page == root_doc:
        source[0] += "".join(_toctree(title, pages) for title, pages in NAVIGATION.items())
    if page == "docs/decisions/README":
        source[0] += _toctree("Decisions", ["0*"], "glob")


def _toctree(caption: str, pages: list[str], *options: str) -> str:
    flags = "".join(f":{option}:\n" for option in ("hidden", *options))
    return f"\n```{{toctree}}\n{flags}:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def _write_index(app: Sphinx, failure: Exception | None) -> None:
    if failure is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))
