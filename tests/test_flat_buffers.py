"""Tensors in one flat buffer: views, bounds, overlaps, dtypes, each fault by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moegraft.adapters import flat_tensors
from moegraft.errors import AdapterError
from moegraft.testing import assert_bit_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_views_of_the_buffer_in_any_order(dtype: torch.dtype) -> None:
    buffer = torch.arange(20, dtype=dtype).requires_grad_()
    index = {"b": (8, (2, 3)), "a": [0, [2, 2, 2], dtype], "none": (20, (0, 4)), "one": (15, ())}
    found = flat_tensors(buffer, index)
    assert list(found) == list(index)
    assert_bit_equal(found["b"], torch.arange(8, 14, dtype=dtype).view(2, 3))
    assert_bit_equal(found["a"], torch.arange(8, dtype=dtype).view(2, 2, 2))
    assert found["none"].shape == (0, 4) and found["one"].item() == 15
    storage = buffer.untyped_storage().data_ptr()
    for tensor in found.values():
        assert tensor.untyped_storage().data_ptr() == storage and not tensor.requires_grad


def test_a_buffer_of_bytes_holds_several_dtypes() -> None:
    parts = {
        "x": torch.randn(3, 2),
        "y": torch.randn(5).bfloat16(),
        "z": torch.randn(2, 2).half(),
    }
    pieces, index, at = [], {}, 0
    for name, tensor in parts.items():
        pieces.append(tensor.flatten().view(torch.uint8))
        index[name] = (at, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        at += pieces[-1].numel()
    buffer = torch.cat(pieces)
    for name, tensor in flat_tensors(buffer, index).items():
        assert_bit_equal(tensor, parts[name])
    with pytest.raises(AdapterError, match=r"'y' begins at byte 25, .* multiple of 2"):
        flat_tensors(buffer, {**index, "y": (25, (2,), "bfloat16")})


def test_a_part_of_a_larger_buffer_is_read_from_its_own_start() -> None:
    whole = torch.arange(10.0)
    assert_bit_equal(flat_tensors(whole[4:], {"x": (1, (2,))})["x"], torch.tensor([5.0, 6.0]))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": (0, (3, 4)), "b": (10, (3,))}, r"'b' takes elements 10 to 13 of a buffer of 12"),
        ({"a": (13, (0,))}, r"'a' takes elements 13 to 13"),
        ({"a": (0, (4,)), "b": (3, (2,))}, r"'a' and 'b' overlap: one ends at 4, .* at 3"),
        ({"b": (2, (2,)), "a": (2, (2,))}, r"'a' and 'b' overlap"),
        ({"a": (-1, (2,))}, r"'a' has offset -1"),
        ({"a": (10**5000, (2,))}, r"'a' has offset a int too large to show"),
        ({"a": (0, (10**30,))}, r"below 2\^62"),
        ({"a": (0, (0, 2**61, 2**61))}, r"'a' has the shape \(0, "),
        ({"a": (0, (1,) * 9)}, r"'a' has the shape \(1, "),
        ({"a\n" * 100: 3}, r"'a\\na.*\.\.\.' is 3"),
        ({"a": (0, (2, -2))}, r"'a' has offset 0 and shape \(2, -2\)"),
        ({"a": (0.0, (2,))}, r"'a' has offset 0\.0"),
        ({"a": (True, (2,))}, r"'a' has offset True"),
        ({"a": (0, 2)}, r"'a' has offset 0 and shape 2"),
        ({"a": (0,)}, r"'a' is \(0,\); \(offset, shape\)"),
        ({"a": 3}, r"'a' is 3"),
        ({7: (0, (2,))}, r"7, which is no tensor name"),
        ({"a": (0, (2,), "int8")}, r"'a' is said to be 'int8'"),
        ({"a": (0, (2,), torch.float64)}, r"'a' is said to be torch\.float64"),
        ({"a": (0, (2,), "bfloat16")}, r"'a' is said to be torch\.bfloat16, the buffer is .*uint8"),
        ({}, r"index must map tensor names"),
        (None, r"index must map tensor names"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_name(index: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        flat_tensors(torch.zeros(12), index)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(24)[::2], r"strides \(2,\); it must be 1-D and contiguous"),
        (torch.zeros(3, 4), r"shape \(3, 4\)"),
        (torch.zeros(12, dtype=torch.float64), r"is torch\.float64"),
        (torch.zeros(12, dtype=torch.int8), r"is torch\.int8"),
        (torch.zeros(12, device="meta"), r"is on meta; it must be on the CPU\."),
        (b"bytes", r"is a bytes; a 1-D tensor"),
        (torch.zeros(12, dtype=torch.uint8), r"'a' has no dtype"),
    ],
)
def test_a_buffer_of_another_kind_or_place_is_refused(buffer: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        flat_tensors(buffer, {"a": (0, (2,))})
