"""Hostile and damaged safetensors headers: one line of why, in little time and memory."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import tiny
from moegraft.adapters.file_policy import DEFAULT_POLICY, FilePolicy
from moegraft.adapters.header import read_header
from moegraft.adapters.stored import Header
from moegraft.errors import AdapterError

NAME = "model.layers.0.self_attn.q_proj.lora_A.weight"
F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(header: Any, data_bytes: int = 24) -> bytes:
    """A file with this header: an object, or its bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data_bytes)


def header_of(content: bytes, policy: FilePolicy = DEFAULT_POLICY) -> Header:
    """Read the header of a file in memory."""
    return read_header(io.BytesIO(content), len(content), "the file", policy)


def refused(content: bytes, message: str, policy: FilePolicy = DEFAULT_POLICY) -> None:
    """The file is refused, in one line that says why."""
    with pytest.raises(AdapterError, match=message) as caught:
        header_of(content, policy)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"a": '{"b": ["c"]}', "d": "\n"}, {}])
def test_a_file_of_safetensors_has_the_header_that_it_wrote(metadata: Any) -> None:
    tensors = {
        f"{NAME}{i}": torch.full((i, 3), i, dtype=dtype)
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 3)
    }
    content = save(tensors, metadata)
    found = header_of(content)
    assert found.metadata == (metadata or {})
    assert found.data_begin + found.data_bytes == len(content)
    for name, tensor in load(content).items():
        dtype, shape, begin, end = found.tensors[name]
        assert (dtype, shape) == (tensor.dtype, tuple(tensor.shape))
        data = content[found.data_begin :][begin:end]
        assert bytes(tensor.flatten().view(torch.uint8).tolist()) == data


def test_the_same_header_in_other_spellings_reads_the_same() -> None:
    header = {NAME: F32, "x.lora_B.weight": {**F32, "data_offsets": [24, 48]}}
    plain = json.dumps(header, separators=(",", ":")).encode()
    wanted = header_of(file_of(plain, 48)).tensors
    assert list(wanted) == list(header)
    escaped = plain.replace(b"model", b"\\u006dodel")
    other_order = {n: dict(reversed(e.items())) for n, e in header.items()}  # type: ignore[attr-defined]
    for same in (header, escaped, plain + b"   ", json.dumps(header, indent=1).encode()):
        assert header_of(file_of(same, 48)).tensors == wanted
    assert header_of(file_of(other_order, 48)).tensors == wanted


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**F32, "shape": [2, 4]}, "so 32 bytes, but has bytes 0 to 24"),
        ({**F32, "shape": [-2, -3]}, r"has the shape \[-2, -3\]"),
        ({**F32, "shape": [2.0, 3]}, r"has the shape \[2.0, 3\]"),
        ({**F32, "shape": [True, 6]}, r"has the shape \[True, 6\]"),
        ({**F32, "shape": "23"}, "has the shape '23'"),
        ({**F32, "shape": None}, "has the shape None"),
        ({**F32, "shape": [[2, 3]]}, r"has the shape \[\[2, 3\]\]"),
        ({**F32, "shape": [10**30]}, "has the shape"),
        ({**F32, "shape": [1] * 9 + [6]}, r"has the shape \[1, 1"),
        ({**F32, "shape": [2**31, 2**31, 2**31]}, "has the shape"),
        ({**F32, "shape": [0, 2**61, 2**61], "data_offsets": [0, 0]}, "has the shape"),
        ({**F32, "data_offsets": [24, 0]}, "but has bytes 24 to 0"),
        ({**F32, "data_offsets": [24, 48]}, "is the first one, but begins at byte 24"),
        ({**F32, "data_offsets": [-24, 0]}, r"has the offsets \[-24, 0\]"),
        ({**F32, "data_offsets": [0]}, r"has the offsets \[0\]"),
        ({**F32, "data_offsets": [0, 2**63]}, "has the offsets"),
        ({**F32, "data_offsets": {"0": 24}}, "has the offsets"),
        ({**F32, "dtype": "F8_E4M3", "shape": [24]}, "F8_E4M3'; factors must be .*store it as bf"),
        ({**F32, "dtype": "F8_E5M2", "shape": [24]}, "8-bit floats need scales"),
        ({**F32, "dtype": "F64", "shape": [3]}, "'F64'; factors must be float32"),
        ({**F32, "dtype": "I8", "shape": [24]}, r"'I8'; factors must be .* float16\.$"),
        ({**F32, "dtype": "x\ny"}, "factors must be"),
        ({**F32, "dtype": ["F32"]}, "factors must be"),
        ({**F32, "more": 1}, "without dtype, shape and data_offsets alone"),
        ({"dtype": "F32", "shape": [6]}, "without dtype, shape and data_offsets alone"),
        ([], "without dtype, shape and data_offsets alone"),
    ],
)
def test_an_entry_that_lies_is_refused_by_its_name(entry: Any, message: str) -> None:
    for spelling in (
        json.dumps({NAME: entry}).encode(),
        json.dumps({NAME: entry}, separators=(",", ":")).encode(),
    ):
        refused(file_of(spelling), message)
        refused(file_of(spelling), NAME)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 24), (0, 24)], "overlap: 24 and 0"),
        ([(0, 24), (12, 36)], "overlap: 24 and 12"),
        ([(0, 24), (28, 52)], "leave a hole: 24 and 28"),
        ([(24, 48), (48, 72)], "begins at byte 24"),
        ([(0, 24), (24, 48)], "its tensors have 48 bytes, its data 60"),
        ([], "60 bytes of data belong to no tensor"),
    ],
)
def test_offsets_cover_the_data_or_the_file_is_refused(spans: Any, message: str) -> None:
    header = {f"{NAME}{i}": {**F32, "data_offsets": list(span)} for i, span in enumerate(spans)}
    refused(file_of(header, 60), message)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":%s,"a":%s}' % ((json.dumps(F32).encode(),) * 2),
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}',
        rb'{"a":{"dtype":"F32","\u0064type":"F32","shape":[6],"data_offsets":[0,24]}}',
        b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},'
        b'"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}',
        b'{"__metadata__":{"a":"b","a":"c"},"x":%s}' % json.dumps(F32).encode(),
        b'{"__metadata__":{"a":"b"},"x":%s,"__metadata__":{"a":"c"}}' % json.dumps(F32).encode(),
    ],
)
def test_a_key_that_is_there_twice_is_refused_by_name(raw: bytes) -> None:
    refused(file_of(raw), "holds the key '.+' twice")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b" {}", "no JSON object"),
        (b'{"a":', "not readable JSON"),
        (b'{"a":NaN}', "holds NaN"),
        (b'{"a":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,24]}}', "holds -Infinity"),
        (b'{"a":{"dtype":"F32","shape":[06],"data_offsets":[0,24]}}', "not readable JSON"),
        (b'{"a":{"dtype":"F32","shape":[6,],"data_offsets":[0,24]}}', "not readable JSON"),
        (b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,024]}}', "not readable JSON"),
        (b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}} x', "not readable JSON"),
        (b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},}', "not readable JSON"),
        (b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}}', "not readable JSON"),
        (b'{"a\xff":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}', "not readable JSON"),
        (b'{"a":' + b"[" * 200_000, "not readable JSON"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "nests deeper than 32 levels"),
        (b'{"a":' + b"9" * 100_000 + b"}", "not readable JSON"),
        (b'{"__metadata__":{"a":1}}', "__metadata__ that is no object of texts"),
        (b'{"__metadata__":[]}', "__metadata__ that is no object of texts"),
        (b'{"a\\nb":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}', r"named 'a\\nb'"),
        (b'{"\\u001b[31m":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}', "printable"),
        (b'{"\\ud800":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}', "printable"),
        (b'{"%s":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}' % (b"a" * 1001), "at most"),
    ],
)
def test_text_that_is_no_header_is_refused(raw: bytes, message: str) -> None:
    refused(file_of(raw), message)


@pytest.mark.parametrize("length", [0, 1, 23, 2**16, 2**32, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(length: int) -> None:
    good = file_of({NAME: F32})
    refused(length.to_bytes(8, "little") + good[8:], "not a readable safetensors file")
    for short in range(8):
        refused(good[:short], "not a readable safetensors file")


def test_the_limits_of_a_policy_are_named() -> None:
    content = file_of({NAME: F32, "b": {**F32, "data_offsets": [24, 48]}}, 48)
    header_of(content, FilePolicy(max_tensors=2, max_bytes=len(content)))
    for limits, message in (
        ({"max_bytes": len(content) - 1}, r"over the limit of \d+ \(FilePolicy.max_bytes\)"),
        ({"max_header_bytes": 100}, "over the limit of 100 .FilePolicy.max_header_bytes"),
        ({"max_tensors": 1}, "1 tensors"),
    ):
        refused(content, message, FilePolicy(**limits))


@pytest.mark.parametrize(
    "filler", [b"[],", b"{},", b"0,", b'"",', b'{"":0},', b"[[[[],[]]]],"], ids=lambda f: f.decode()
)
def test_a_long_hostile_header_costs_little_time_and_memory(filler: bytes) -> None:
    raw = b'{"a":[' + filler * (48_000_000 // len(filler))
    raw = raw[:-1] + b"]}"
    content = file_of(raw)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        refused(content, "tensors need|not readable|without dtype")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(raw) and time.perf_counter() - start < 60


@pytest.mark.parametrize("name", [b'"', b"\\", b'":{"dtype":"F32","shape":[', b"1,1,1,1"])
def test_a_header_that_nearly_fits_the_plain_form_costs_little_time(name: bytes) -> None:
    good = b'"x":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]},'
    start = time.perf_counter()
    refused(file_of(b"{" + (good + name) * 50_000 + b"}"), "safetensors file|holds the key")
    refused(file_of(b'{"x":{"dtype":"F32","shape":[' + b"1" * 1_000_000 + b"!]}}"), "not readable")
    assert time.perf_counter() - start < 20


@settings(max_examples=600, deadline=None)
@example([(0, 0x00)])
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_real_header_with_any_bytes_changed_reads_as_in_safetensors_or_is_refused(
    changes: list[tuple[int, int]],
) -> None:
    content = bytearray(save(tiny.tensors_of("peft/0.21.2/qwen3_moe/router")))
    length = int.from_bytes(content[:8], "little")
    for at, byte in changes:
        content[at % (8 + length)] = byte
    try:
        found = header_of(bytes(content))
    except AdapterError as error:
        assert "\n" not in str(error)
        return
    theirs = load(bytes(content))
    assert {n: (t.dtype, t.shape) for n, t in found.tensors.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in theirs.items()
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("F32"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", NAME, ""]), inner
        )
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.text(max_size=5) | st.just(NAME), JSON), st.integers(0, 32))
def test_any_json_is_a_header_or_refused_in_one_line(header: Any, data_bytes: int) -> None:
    try:
        found = header_of(file_of(header, data_bytes))
    except AdapterError as error:
        assert "\n" not in str(error)
        return
    assert sum(t.end - t.begin for t in found.tensors.values()) == data_bytes


def test_a_header_of_100_000_tensors_is_read_in_seconds() -> None:
    entries = {
        f"base_model.model.model.layers.{i // 1536}.mlp.experts.{i % 256}.{i}.lora_A.weight": {
            "dtype": "BF16",
            "shape": [1, 2],
            "data_offsets": [4 * i, 4 * i + 4],
        }
        for i in range(100_000)
    }
    for separators in ((",", ":"), (", ", ": ")):
        raw = json.dumps(entries, separators=separators).encode()
        content = file_of(raw, 400_000)
        start = time.perf_counter()
        assert len(header_of(content).tensors) == 100_000
        assert time.perf_counter() - start < 20
