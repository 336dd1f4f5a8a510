"""Prompts as chained hashes of complete blocks: equal hashes mean equal prefixes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

TEXT_BLOCK_BYTES: Final = 64
"""Of UTF-8: about 16 tokens, vLLM's block on a GPU."""
MAX_BLOCKS: Final = 512
"""Later blocks are ignored: 8,192 tokens at 16 a block, hashed in half a millisecond."""
_HASH_BYTES: Final = 8

Chain = tuple[int, ...]
"""A 64-bit hash for each complete block, which depends on all blocks before it."""


def chain_of(content: Mapping[str, Any], block_tokens: int) -> Chain:
    """The chain of a request's prompt; empty without a complete, readable block.

    A request with several prompts counts by its first.

    Args:
        content: body of a completion (`prompt`) or a chat completion (`messages`, `tools`).
        block_tokens: the engine's block size, for prompts of token ids.
    """
    if "messages" in content:
        return _of_bytes(_chat_text(content))
    prompt = content.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_bytes(prompt.encode(errors="replace"))
    if isinstance(prompt, list):
        return _of_tokens(prompt, block_tokens)
    return ()


def _of_tokens(prompt: list[Any], block_tokens: int) -> Chain:
    """By `hash`: for integers it is the same in every process, and costs a third of a digest."""
    key, found = 0, []
    try:
        for start in range(0, _end(len(prompt), block_tokens), block_tokens):
            key = hash((key, *prompt[start : start + block_tokens]))
            found.append(key)
    except TypeError:
        return ()  # not token ids: the engine will refuse it
    return tuple(found)


def _of_bytes(data: bytes) -> Chain:
    state = hashlib.blake2b(digest_size=_HASH_BYTES)
    found = []
    for start in range(0, _end(len(data), TEXT_BLOCK_BYTES), TEXT_BLOCK_BYTES):
        state.update(data[start : start + TEXT_BLOCK_BYTES])
        found.append(int.from_bytes(state.digest()))
    return tuple(found)


def _end(length: int, block: int) -> int:
    """End of the last complete block that counts."""
    return min(length // block, MAX_BLOCKS) * block


def _chat_text(content: Mapping[str, Any]) -> bytes:
    """The parts of a chat request that a template turns into the prompt, in order."""
    parts = [_text(content.get("tools") or "")]
    messages = content["messages"]
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            parts += [_text(message.get("role", "")), _text(message.get("content") or "")]
            if message.get("tool_calls"):
                parts.append(_text(message["tool_calls"]))
    return "\0".join(parts).encode(errors="replace")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
