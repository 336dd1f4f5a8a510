"""The double's language model: a distribution over the next token from hashes, nothing learnt.

It has the three traits of a real one that matter here. The same weights and tokens give the same
numbers in every process; other weights give clearly other ones; weights that change nothing give
the base model's.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BASE_SPREAD = 2.0
"""Width of the base model's logits: its log-probabilities lie within 2 of each other."""
_ADAPTER_SPREAD = 0.8
"""Width of an adapter's change: about 0.25 in the mean, as for rank-1 adapters of std 0.3."""


@dataclass(frozen=True, slots=True)
class Context:
    """A prefix: what the base model makes of it, and what the weights that read it make of it."""

    tokens: bytes
    weights: bytes


EMPTY = Context(b"", b"")


def extend(context: Context, token_ids: Iterable[int], key: bytes) -> Context:
    """Return the context after `token_ids`, read with the weights of `key`.

    As in a KV cache, what was read with other weights stays as it was read.
    """
    tokens, weights = context.tokens, context.weights
    for token_id in token_ids:
        token = token_id.to_bytes(4, "little")
        tokens = hashlib.sha256(tokens + token).digest()
        weights = hashlib.sha256(weights + key + token).digest()
    return Context(tokens, weights)


def log_probabilities(context: Context, key: bytes, vocab_size: int) -> NDArray[np.float64]:
    """Return log p(next token | context) under the weights of `key`, shape `(vocab_size,)`."""
    logits = _BASE_SPREAD * _uniform(context.tokens, vocab_size)
    if key:
        logits += _ADAPTER_SPREAD * _uniform(context.weights + key, vocab_size)
    logits -= np.log(np.exp(logits).sum())
    return logits


def _uniform(seed: bytes, count: int) -> NDArray[np.float64]:
    noise = hashlib.shake_256(seed).digest(2 * count)
    return np.frombuffer(noise, dtype="<u2") / 65535.0


def sample(scores: NDArray[np.float64], temperature: float, draw: float) -> int:
    """Return the token at the quantile `draw` (0 <= draw < 1) of the tempered distribution."""
    scaled = scores / temperature
    probabilities = np.exp(scaled - scaled.max())
    cumulated = np.cumsum(probabilities)
    return int(np.searchsorted(cumulated, draw * cumulated[-1], side="right"))


_FIRST_BYTE = 3
"""Tokens 0 to 2 are special, the next 256 are bytes, those above read as ` <number>`."""


def encode(text: str) -> list[int]:
    """Return one token for each byte of `text`."""
    return [byte + _FIRST_BYTE for byte in text.encode()]


def decode(token_ids: Iterable[int]) -> str:
    """Return the text of `token_ids`; special tokens have none."""
    pieces = []
    for token_id in token_ids:
        if token_id >= _FIRST_BYTE + 256:
            pieces.append(f" {token_id}".encode())
        elif token_id >= _FIRST_BYTE:
            pieces.append(bytes([token_id - _FIRST_BYTE]))
    return b"".join(pieces).decode(errors="replace")
