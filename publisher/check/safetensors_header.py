"""Safetensors files: the header, and whether every number is finite. Pure; needs no torch.

Format: 8 bytes little-endian length, that many bytes of JSON (name -> dtype, shape, data_offsets),
then the data, without gap or overlap (github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

Layout = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_CHUNK = 1 << 18
"""Numbers checked at once: the second pass then reads from the CPU's cache."""


_FLOATS: Mapping[str, tuple[int, int]] = {
    "F64": (64, 0x7FF0_0000_0000_0000),
    "F32": (32, 0x7F80_0000),
    "F16": (16, 0x7C00),
    "BF16": (16, 0x7F80),
    "F8_E5M2": (8, 0x7C),
    "F8_E4M3": (8, 0x7F),
}
"""Floating-point type -> bits, and the first bit pattern that is not finite.

Patterns order like the magnitudes they stand for, so a positive number is finite when its pattern
is below that one, and a negative one when it is below that one with the sign bit set."""
FLOAT_DTYPES = frozenset(_FLOATS)
_OTHER_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
}
_BITS: Mapping[str, int] = {**_OTHER_BITS, **{name: bits for name, (bits, _) in _FLOATS.items()}}


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class HeaderInvalid(ValueError):
    """The bytes are not a complete safetensors file."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a file, as the header describes it."""

    dtype: str
    """BF16, F32, ..."""
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]
    """Begin and end of its bytes in the data that follow the header."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    tensors: Mapping[str, Tensor]
    """By name, in the order of their data."""
    data_start: int
    """Offset of the data in the file."""

    @property
    def layout(self) -> Layout:
        """The tensors' shapes."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


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


def read_header(
    read: Callable[[int], bytes], file_bytes: int | None = None
) -> tuple[bytes, Header]:
    """The first bytes of a file, up to its data, and what they say.

    Args:
        read: gives the file's first bytes, at most as many as it is asked for.
        file_bytes: as for `parse_header`, whose errors it raises.
    """
    head = read(header_bytes(read(LENGTH_BYTES)))
    return head, parse_header(head, file_bytes)


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
    found = _tensors(head[LENGTH_BYTES:data_start]).items()
    tensors = dict(sorted(found, key=lambda item: item[1].data_offsets))
    reached = 0
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        if begin != reached:
            raise HeaderInvalid(f"the data of tensor {name!r:.120} overlap or leave a gap")
        reached = end
    if file_bytes is not None and data_start + reached != file_bytes:
        raise HeaderInvalid(
            f"it has {file_bytes} bytes, its header accounts for {data_start + reached}"
        )
    return Header(tensors, data_start)


def _tensors(text: bytes) -> dict[str, Tensor]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        noted = raw.pop("__metadata__", msgspec.Raw(b"null"))
        msgspec.json.decode(noted, type=dict[str, str] | None)
    except (ValueError, RecursionError) as error:
        raise HeaderInvalid(f"its header is not the JSON of safetensors: {error}") from error
    tensors = {}
    for name, value in raw.items():
        try:
            tensors[name] = _tensor(value)
        except (ValueError, RecursionError) as error:
            raise HeaderInvalid(
                f"its header describes tensor {name!r:.120} wrongly: {error}"
            ) from error
    return tensors


def _tensor(text: msgspec.Raw) -> Tensor:
    tensor = msgspec.json.decode(text, type=Tensor)
    dtype, shape, (begin, end) = tensor.dtype, tensor.shape, tensor.data_offsets
    if dtype not in _BITS:
        raise ValueError(f"dtype {dtype!r:.20} is unknown")
    size = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != size:
        raise ValueError(f"{dtype} of shape {shape} takes {size} bytes, not {end - begin}")
    return tensor


def first_not_finite(content: Any, header: Header) -> str | None:
    """The name of the first tensor that holds NaN or infinity; None when all are finite.

    Args:
        content: the whole file as a buffer (bytes, mmap).
        header: of this file. Tensors that are no floats are passed over.
    """
    for name, tensor in header.tensors.items():
        if tensor.dtype in _FLOATS and not _is_finite(content, header.data_start, tensor):
            return name
    return None


def all_zero(content: Any, header: Header, part: str) -> bool:
    """Whether each tensor with `part` in its name holds nothing but zeros.

    Args:
        content: the whole file as a buffer (bytes, mmap).
        header: of this file.
        part: of the names.
    """
    for name, tensor in header.tensors.items():
        begin, end = tensor.data_offsets
        data = np.frombuffer(content, np.uint8, end - begin, header.data_start + begin)
        if part in name and data.any():
            return False
    return True


def _is_finite(content: Any, data_start: int, tensor: Tensor) -> bool:
    bits, special = _FLOATS[tensor.dtype]
    begin, end = tensor.data_offsets
    count = (end - begin) * 8 // bits
    patterns = np.frombuffer(
        content, dtype=f"<u{bits // 8}", count=count, offset=data_start + begin
    )
    signed = patterns.view(f"<i{bits // 8}")
    for start in range(0, count, _CHUNK):
        stop = start + _CHUNK
        # signed, the greatest is the greatest positive; unsigned, the greatest negative if any
        if int(signed[start:stop].max()) >= special:
            return False
        if int(patterns[start:stop].max()) >= special | 1 << (bits - 1):
            return False
    return True
