"""How many tokens an answer had, read from its last bytes alone. Pure."""

from __future__ import annotations

import re
from typing import Final

TAIL_BYTES: Final = 4096
"""vLLM 0.32 writes `usage` behind the choices; only short fields follow it."""
_USAGE = re.compile(rb'"usage":\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')


def usage(tail: bytes) -> tuple[int, int]:
    """(prompt tokens, completion tokens); zeros where the answer does not tell.

    Inside a JSON text a quote is escaped, so what looks like the field is the field.
    """
    at = tail.rfind(b'"usage":')
    found = _USAGE.match(tail, at) if at >= 0 else None
    if found is None:
        return 0, 0
    return _number(_PROMPT, found[1]), _number(_COMPLETION, found[1])


def _number(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0
