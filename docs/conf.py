"""How Sphinx builds the site from README.md, docs/, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md.

    make docs        # strict: a warning fails; fetches nothing

The source directory is the repository's root, so that the same relative links work in the site and
where the repository is browsed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "policyline"
author = "the policyline authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md"]

NAVIGATION = {
    "Start": ["docs/quickstart-trl", "docs/concepts"],
    "Run it": ["docs/router", "docs/metrics", "docs/ledger", "docs/postgres", "docs/backup"],
    "Know it": ["docs/architecture", "docs/engine", "docs/benchmarks", "docs/limits", "docs/api"],
    "Carry on": ["CONTRIBUTING", "SECURITY", "CHANGELOG", "docs/decisions/README"],
}

myst_heading_anchors = 3
myst_links_external_new_tab = False

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
    """Give the site its navigation, and an index.html to begin at."""
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _write_index)


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
