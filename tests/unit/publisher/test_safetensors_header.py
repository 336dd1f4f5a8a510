"""Headers are believed only when the safetensors library would; NaN is found in every format."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from policyline.publisher.check.safetensors_header import (
    FLOAT_DTYPES,
    MAX_HEADER_BYTES,
    Header,
    HeaderInvalid,
    Tensor,
    first_not_finite,
    header_bytes,
    parse_header,
)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float64", "float32", "float16", "int8", "uint16", "int64", "bool"])


def parse(content: bytes) -> Header:
    return parse_header(content[: header_bytes(content)], len(content))


def one_number(dtype: str, width: int) -> tuple[bytes, Header]:
    """A file of one zero of `width` bytes, the last bytes of the file, and its header."""
    entry = {"dtype": dtype, "shape": [1], "data_offsets": [0, width]}
    text = json.dumps({"t": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(width)
    return content, parse(content)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(SHAPES, DTYPES), max_size=5))
def test_reads_what_the_library_writes(wanted: dict[str, tuple[tuple[int, ...], str]]) -> None:
    wanted.pop("__metadata__", None)
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in wanted.items()}
    content = save(arrays, metadata={"format": "pt"})
    header = parse(content)
    assert header.layout == {n: s for n, (s, _) in wanted.items()}
    for name, tensor in header.tensors.items():
        begin, end = tensor.data_offsets
        assert end - begin == arrays[name].nbytes


CONTENT = save(
    {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.zeros(4, "float16")},
    metadata={"format": "pt"},
)


@pytest.mark.parametrize("length", range(len(CONTENT)))
def test_refuses_a_file_cut_off_anywhere(length: int) -> None:
    with pytest.raises(HeaderInvalid):
        parse(CONTENT[:length])


@given(st.integers(0, len(CONTENT) - 1), st.binary(min_size=1, max_size=4))
def test_believes_nothing_that_the_library_refuses(at: int, patch: bytes) -> None:
    content = CONTENT[:at] + patch + CONTENT[at + len(patch) :]
    try:
        header = parse(content)
    except HeaderInvalid:
        return
    assert load(content).keys() == header.tensors.keys()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([("a", [0, 8]), ("b", [4, 12])], "overlap"),
        ([("a", [0, 8]), ("b", [12, 20])], "gap"),
        ([("a", [4, 12])], "gap"),
        ([("a", [0, 4])], "takes 8 bytes, not 4"),
        ([("a", [8, 0])], "takes 8 bytes, not -8"),
        ([("a", [-8, 0])], "Expected `int` >= 0"),
    ],
)
def test_names_what_is_wrong_with_the_offsets(
    entries: list[tuple[str, list[int]]], says: str
) -> None:
    text = json.dumps(
        {name: {"dtype": "F32", "shape": [2], "data_offsets": o} for name, o in entries}
    ).encode()
    with pytest.raises(HeaderInvalid, match=says):
        parse_header(len(text).to_bytes(8, "little") + text, None)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"null", b"{", b"\xff", b"[" * 5000),
        *(b'{"a": 1}', b'{"a": {}}', b'{"a": null}', b'{"__metadata__": {"a": 1}}'),
        *(b'{"__metadata__": 1}', b'{"__metadata__": {"a": NaN}}', "{}".encode("utf-16")),
        b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F33", "shape": [], "data_offsets": [0, 4]}}',
    ],
)
def test_refuses_what_is_no_header(text: bytes) -> None:
    with pytest.raises(HeaderInvalid):
        parse_header(len(text).to_bytes(8, "little") + text, None)


def test_refuses_a_header_too_long_to_read() -> None:
    with pytest.raises(HeaderInvalid, match="claims"):
        header_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))


def test_finds_every_half_precision_number_that_is_not_finite() -> None:
    content, header = one_number("F16", 2)
    for pattern in range(1 << 16):
        bits = pattern.to_bytes(2, "little")
        finite = bool(np.isfinite(np.frombuffer(bits, "<f2")[0]))
        assert (first_not_finite(content[:-2] + bits, header) is None) == finite, hex(pattern)


def test_finds_every_bfloat16_number_that_is_not_finite() -> None:
    content, header = one_number("BF16", 2)
    for pattern in range(1 << 16):
        bits = pattern.to_bytes(2, "little")
        # a bfloat16 is the upper half of a float32
        finite = bool(np.isfinite(np.frombuffer(bytes(2) + bits, "<f4")[0]))
        assert (first_not_finite(content[:-2] + bits, header) is None) == finite, hex(pattern)


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3"])
def test_finds_every_eight_bit_number_that_is_not_finite(dtype: str) -> None:
    content, header = one_number(dtype, 1)
    for pattern in range(1 << 8):
        bits = bytes([pattern])
        if dtype == "F8_E5M2":  # the upper half of a float16
            finite = bool(np.isfinite(np.frombuffer(bytes(1) + bits, "<f2")[0]))
        else:  # no infinities, one NaN of each sign
            finite = pattern & 0x7F != 0x7F
        assert (first_not_finite(content[:-1] + bits, header) is None) == finite, hex(pattern)


@pytest.mark.parametrize(("dtype", "kind"), [("F32", "<f4"), ("F64", "<f8")])
@given(number=st.floats(width=32))
def test_finds_long_numbers_that_are_not_finite(dtype: str, kind: str, number: float) -> None:
    bits = np.array([number], kind).tobytes()
    content, header = one_number(dtype, len(bits))
    found = first_not_finite(content[: -len(bits)] + bits, header)
    assert (found is None) == bool(np.isfinite(number))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1, 299_999, 300_000, 599_999])
def test_names_the_tensor_wherever_the_number_is(bad: float, at: int) -> None:
    values = np.linspace(-1, 1, 600_000, dtype="float32")
    values[at] = bad
    content = save({"first": values[:300_000], "second": values[300_000:], "int": np.arange(3)})
    found = first_not_finite(content, parse(content))
    assert found == ("first" if at < 300_000 else "second")


def test_passes_over_integers_and_empty_tensors() -> None:
    content = save({"i": np.full(4, -1, "int32"), "e": np.zeros((0, 4), "float32")})
    assert first_not_finite(content, parse(content)) is None


def test_knows_floats_by_the_names_of_the_format() -> None:
    assert {"F16", "BF16", "F32"} <= FLOAT_DTYPES
    assert Tensor("F32", (1,), (0, 4)).dtype in FLOAT_DTYPES
