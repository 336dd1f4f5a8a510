"""The pages, and the code that stands in them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
TRACKED = frozenset(
    subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    .stdout.splitlines()
)  # fmt: skip
PAGES = sorted(name for name in TRACKED if name.endswith(".md"))
PRESENT = [name for name in PAGES if name != "CHANGELOG.md"]
"""Pages that say how things are; the changelog also has names that are gone."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_END_OF_COMMAND = {"|", "&", "&&", ";", ">", ">>"}


@dataclass(frozen=True, slots=True)
class Code:
    """One block, or one span of inline code."""

    page: str
    text: str
    language: str | None
    """None: inline code."""


def read(page: str) -> str:
    return (ROOT / page).read_text()


def codes(pages: list[str]) -> Iterator[Code]:
    """All code of these pages."""
    for page in pages:
        text = read(page)
        for language, block in _FENCE.findall(text):
            yield Code(page, block, language)
        prose = _FENCE.sub("", text)
        for block in _INDENTED.findall(prose):
            yield Code(page, block, "")
        for span in _INLINE.findall(_INDENTED.sub("", prose)):
            yield Code(page, span, None)


def commands(code: Code, program: str) -> Iterator[list[str]]:
    """The arguments of each call of `program`, which may stand behind others on its line."""
    for line in code.text.replace("\\\n", " ").splitlines():
        if not re.search(rf"\b{program}\b", line):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # prose, a picture or another language
        for start, word in enumerate(words):
            if word == program:
                rest = words[start + 1 :]
                ends = [n for n, other in enumerate(rest) if other in _END_OF_COMMAND]
                yield rest[: ends[0]] if ends else rest
