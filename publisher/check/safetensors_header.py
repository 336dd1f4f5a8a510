"""Safetensors files: the header, and whether every number is finite. Pure; needs no torch.

Format: 8 bytes little-endian length, that many bytes of JSON (name -> dtype, shape, data_offsets),
then the data, without gap or overlap (github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_CHUNK = 1 << 18
"""Numbers checked at once: the second pass then reads from the CPU's cache."""


@dataclass(frozen=True, slots=True)
class _Float:
    """How a floating-point type is laid out: the first bit pattern that is not finite.

    Patterns order like the magnitudes they stand for, so a positive number is finite when its
    pattern is below `special`, and a negative one when it is below that with the sign bit set.
    """

    bits: int
    special: int


_FLOATS: Mapping[str, _Float] = {
    "F64": _Float(64, 0x7FF0_0000_0000_0000),
    "F32": _Float(32, 0x7F80_0000),
    "F16": _Float(16, 0x7C00),
    "BF16": _Float(16, 0x7F80),
    "F8_E5M2": _Float(8, 0x7C),
    "F8_E4M3": _Float(8, 0x7F),
}
FLOAT_DTYPES = frozenset(_FLOATS)
_OTHER_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
}
_BITS: Mapping[str, int] = {**_OTHER_BITS, **{name: f.bits for name, f in _FLOATS.items()}}


class HeaderInvalid(ValueError):
    """The bytes are not a complete safetensors file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """As written in the header: BF16, F32, ..."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the data that follow the header."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    tensors: tuple[Tensor, ...]
    """In the order of their data."""
    data_start: int
    """Offset of the data in the file."""


def header_bytes(start: bytes) -> int:
    """How many bytes the header takes with its length field, from the file's first 8 bytes.

    Raises:
        HeaderInvalid: too short, or a length that no header has.
    """
    if len(start) < LENGTH_BYTES:
        raise HeaderInvalid(f"it has {len(start)} bytes, too few for a header")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderInvalid(f"its header claims {length} bytes, allowed are {MAX_HEADER_BYTES}")
    return LENGTH_BYTES + length


def parse_header(head: bytes, file_bytes: int | None) -> Header:
    """Read the header and check that it accounts for every byte of the file.

    Args:
        head: the file's first bytes, as many as `header_bytes` says.
        file_bytes: the size of the whole file; None when it is known to be complete.

    Raises:
        HeaderInvalid: truncated, not the format, or data that overlap or leave a gap.
    """
    data_start = header_bytes(head)
    if len(head) < data_start:
        raise HeaderInvalid(f"it is cut off at byte {len(head)}, inside its header")
    tensors = tuple(sorted(_entries(head[LENGTH_BYTES:data_start]), key=lambda t: (t.begin, t.end)))
    reached = 0
    for tensor in tensors:
        if tensor.begin != reached:
            raise HeaderInvalid(f"the data of tensor {tensor.name!r:.120} overlap or leave a gap")
        reached = tensor.end
    if file_bytes is not None and data_start + reached != file_bytes:
        raise HeaderInvalid(
            f"it has {file_bytes} bytes, its header accounts for {data_start + reached}"
        )
    return Header(tensors, data_start)


def _entries(text: bytes) -> Iterator[Tensor]:
    try:
        raw = json.loads(text.decode(), parse_constant=_refuse_constant)
        noted = raw.pop("__metadata__", None)
        usable = noted is None or all(isinstance(value, str) for value in noted.values())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HeaderInvalid("its header is not a JSON object") from error
    if not usable:
        raise HeaderInvalid("its __metadata__ holds something that is no text")
    for name, value in raw.items():
        try:
            name.encode()  # JSON can spell text that UTF-8 cannot, nor so the library
            yield _tensor(name, value)
        except (TypeError, KeyError, ValueError) as error:
            raise HeaderInvalid(
                f"its header describes tensor {name!r:.120} wrongly: {error}"
            ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tensor(name: str, value: Mapping[str, Any]) -> Tensor:
    shape = tuple(_natural(n) for n in value["shape"])
    begin, end = (_natural(n) for n in value["data_offsets"])
    dtype = value["dtype"]
    if dtype not in _BITS:
        raise ValueError(f"dtype {dtype!r:.20} is unknown")
    size = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != size:
        raise ValueError(f"{dtype} of shape {shape} takes {size} bytes, not {end - begin}")
    return Tensor(name, dtype, shape, begin, end)


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.20} is not a number >= 0")
    return value


def first_not_finite(content: Any, header: Header) -> Tensor | None:
    """The first tensor that holds NaN or infinity; None when all are finite.

    Args:
        content: the whole file as a buffer (bytes, mmap).
        header: of this file. Tensors that are no floats are passed over.
    """
    for dtype, run in itertools.groupby(header.tensors, key=lambda t: t.dtype):
        if dtype not in _FLOATS:
            continue
        tensors = list(run)  # neighbours of one type are one array: many are tiny
        if _is_finite(content, dtype, header.data_start, tensors[0].begin, tensors[-1].end):
            continue
        return next(
            t for t in tensors if not _is_finite(content, dtype, header.data_start, t.begin, t.end)
        )
    return None


def all_zero(content: Any, header: Header, part: str) -> bool:
    """Whether each tensor with `part` in its name holds nothing but zeros.

    Args:
        content: the whole file as a buffer (bytes, mmap).
        header: of this file.
        part: of the names.
    """
    for tensor in header.tensors:
        if part not in tensor.name:
            continue
        start, end = header.data_start + tensor.begin, header.data_start + tensor.end
        for at in range(start, end, _CHUNK):
            if np.frombuffer(content, np.uint8, count=min(_CHUNK, end - at), offset=at).any():
                return False
    return True


def _is_finite(content: Any, dtype: str, data_start: int, begin: int, end: int) -> bool:
    layout = _FLOATS[dtype]
    sign = 1 << (layout.bits - 1)
    width = layout.bits // 8
    patterns = np.frombuffer(
        content, dtype=f"<u{width}", count=(end - begin) // width, offset=data_start + begin
    )
    signed = patterns.view(f"<i{width}")
    for start in range(0, len(patterns), _CHUNK):
        stop = start + _CHUNK
        # signed, the greatest is the greatest positive; unsigned, the greatest negative if any
        if int(signed[start:stop].max()) >= layout.special:
            return False
        if int(patterns[start:stop].max()) >= layout.special | sign:
            return False
    return True
