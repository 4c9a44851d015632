"""The header reader believes nothing: each fault is told, and nothing is read beyond it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkpair import safetensors
from sparkpair.problem import Problem


def packed(entries: Any, data: bytes = b"", *, raw: bytes | None = None, length: int | None = None) -> bytes:
    header = json.dumps(entries).encode() if raw is None else raw
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(begin: int, end: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


class Counted:
    """A reader over bytes that notes what it was asked for and fails beyond the end."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []

    def __call__(self, offset: int, count: int) -> bytes:
        self.asked.append((offset, count))
        assert offset + count <= len(self.content), "read beyond the end of the file"
        return self.content[offset : offset + count]


def header_of(content: bytes) -> safetensors.Header:
    return safetensors.read_header(Counted(content), len(content), "x.safetensors")


def test_tensors_come_in_the_order_of_their_bytes_with_absolute_offsets() -> None:
    content = packed({"b": entry(8, 16), "a": entry(0, 8), "__metadata__": {"k": "v"}}, bytes(range(16)))
    header = header_of(content)
    assert list(header.tensors) == ["a", "b"]
    assert header.metadata == {"k": "v"}
    assert safetensors.read_tensor(Counted(content), header.tensors["b"]) == bytes(range(8, 16))


def test_only_the_length_and_the_header_are_read() -> None:
    content = packed({"a": entry(0, 4000)}, bytes(4000))
    reader = Counted(content)
    safetensors.read_header(reader, len(content), "x")
    assert reader.asked == [(0, 8), (8, len(content) - 4008)]


def test_elements_smaller_than_a_byte_are_counted_in_bits() -> None:
    assert header_of(packed({"a": entry(0, 3, "F6_E2M3", [4])}, bytes(3))).tensors["a"].size == 3
    with pytest.raises(Problem, match=r"needed: 0\.5 bytes"):
        header_of(packed({"a": entry(0, 1, "F4", [1])}, bytes(1)))


def test_a_file_without_tensors_and_one_with_an_empty_tensor_are_fine() -> None:
    assert header_of(packed({})).tensors == {}
    assert header_of(packed({"a": entry(0, 0, shape=[0, 5])})).tensors["a"].size == 0


@pytest.mark.parametrize(
    ("content", "found", "reads"),
    [
        (b"", "has 0 bytes", 0),
        (b"\0" * 7, "has 7 bytes", 0),
        (packed({}, length=2**63), "says its header has 9223372036854775808 bytes", 1),
        (packed({}, length=3), "says its header has 3 bytes", 1),
        (struct.pack("<Q", 0), "says its header has 0 bytes", 1),
    ],
)
def test_a_length_that_can_not_be_is_refused_before_the_header_is_read(
    content: bytes, found: str, reads: int
) -> None:
    reader = Counted(content)
    with pytest.raises(Problem) as fault:
        safetensors.read_header(reader, len(content), "x.safetensors")
    assert found in fault.value.found
    assert "x.safetensors" in fault.value.found
    assert len(reader.asked) == reads


def test_a_header_larger_than_the_format_allows_is_refused_unread() -> None:
    size = safetensors.LARGEST_HEADER + 1
    reader = Counted(struct.pack("<Q", size))
    with pytest.raises(Problem, match=f"header has {size} bytes"):
        safetensors.read_header(reader, 8 + 2 * size, "x")
    assert reader.asked == [(0, 8)]


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"[]", "begins with b'['"),
        (b' {"a": 1}', "begins with b' '"),
        (b'{"\xff": 1}', "not UTF-8 (byte 2)"),
        (b'{"a": ', "not JSON"),
        (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 0]}}', "the number NaN"),
        (b'{"a": {}, "a": {}}', "the name 'a' twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}', "'dtype' twice"),
        (b'{"a": ' + b"[" * 50_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"__metadata__": {"k": 1}}', "__metadata__"),
        (b'{"__metadata__": []}', "__metadata__"),
    ],
)
def test_a_header_that_is_no_clean_json_is_refused(raw: bytes, found: str) -> None:
    with pytest.raises(Problem) as fault:
        header_of(packed(None, raw=raw))
    assert found in fault.value.found


@pytest.mark.parametrize(
    ("entries", "data", "name", "found"),
    [
        ({"a": 1}, 0, "a", "not described by"),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "a", "not described by"),
        ({"a": {**entry(0, 4), "more": 1}}, 4, "a", "not described by"),
        ({"a": entry(0, 4, "F33")}, 4, "a", "dtype 'F33'"),
        ({"a": {**entry(0, 4), "dtype": 4}}, 4, "a", "dtype 4"),
        ({"a": entry(0, 4, shape=[-1])}, 4, "a", "shape [-1]"),
        ({"a": entry(0, 4, shape=[True])}, 4, "a", "shape [True]"),
        ({"a": entry(0, 4, shape=[1.0])}, 4, "a", "shape [1.0]"),
        ({"a": entry(0, 4, shape=[2**63])}, 4, "a", "shape"),
        ({"a": {**entry(0, 4), "shape": "1"}}, 4, "a", "shape"),
        ({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4, "a", "data_offsets [4, 0]"),
        ({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, 8, "a", "data_offsets"),
        ({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, 4, "a", "data_offsets"),
        ({"a": entry(0, 8, shape=[1])}, 8, "a", "has 8 bytes for F32 [1]"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b", "overlaps 'a'"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "b", "overlaps 'a'"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "b", "leaves a gap after 'a'"),
        ({"a": entry(4, 8)}, 8, "a", "leaves a gap after the header"),
        ({"a": entry(0, 8)}, 4, "a", "runs past the end"),
        ({"a": entry(0, 2**40)}, 4, "a", "runs past the end"),
        ({"a": entry(0, 4)}, 5, "a", "has 1 bytes after"),
        ({"\ud800": entry(0, 4)}, 4, "ud800", "can't be printed"),
        ({"a\nb": entry(0, 4)}, 4, "a", "can't be printed"),
        ({"": entry(0, 4)}, 4, "", "can't be printed"),
    ],
)
def test_a_tensor_that_can_not_be_is_named(entries: Any, data: int, name: str, found: str) -> None:
    reader = Counted(content := packed(entries, bytes(data)))
    with pytest.raises(Problem) as fault:
        safetensors.read_header(reader, len(content), "x.safetensors")
    assert found in fault.value.found
    assert name in fault.value.found
    assert fault.value.code == "safetensors"
    assert len(reader.asked) == 2


def test_a_file_that_is_cut_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00039.safetensors"
    path.write_bytes(packed({"a": entry(0, 400)}, bytes(400))[:-1])
    with pytest.raises(Problem, match=r"model-00001-of-00039\.safetensors.*runs past the end"):
        safetensors.read_file_header(path)


def accept_or_refuse(content: bytes) -> None:
    """Whatever the bytes, the outcome is a header whose tensors tile the file, or a Problem."""
    reader = Counted(content)
    try:
        header = safetensors.read_header(reader, len(content), "fuzzed")
    except Problem as fault:
        assert "fuzzed" in fault.found
        str(fault).encode()
    else:
        at = 8 + reader.asked[1][1]
        for tensor in header.tensors.values():
            assert tensor.offset == at
            at += tensor.size
        assert at == len(content)
    assert len(reader.asked) <= 2


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_refused_cleanly(content: bytes) -> None:
    accept_or_refuse(content)


@given(st.binary(max_size=120), st.binary(max_size=40), st.integers(-3, 3))
@settings(max_examples=300)
def test_any_header_is_refused_cleanly(raw: bytes, data: bytes, off: int) -> None:
    accept_or_refuse(packed(None, data, raw=b"{" + raw, length=max(len(raw) + 1 + off, 0)))


_any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_near_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4", "BF16"]) | _any_json,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _any_json,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _any_json,
    }
)


@given(st.dictionaries(st.text(max_size=4), _near_entry | _any_json, max_size=4), st.binary(max_size=60))
@settings(max_examples=600)
def test_any_description_of_tensors_is_refused_or_tiles_the_file(entries: Any, data: bytes) -> None:
    accept_or_refuse(packed(entries, data))


@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_a_good_file_with_one_byte_changed_never_tells_more_than_it_holds(
    sizes: list[int], data: st.DataObject
) -> None:
    at, entries = 0, {}
    for number, size in enumerate(sizes):
        entries[f"t{number}"] = entry(at, at + 4 * size)
        at += 4 * size
    content = bytearray(packed(entries, bytes(at)))
    assert len(header_of(bytes(content)).tensors) == len(sizes)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    accept_or_refuse(bytes(content))
