"""Copies in the host's memory: right for every dtype and stride, and never by torch's threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moegraft.host_copy import (
    MAX_THREADS,
    copy_entries,
    in_threads,
    transpose_entries,
    usable_cores,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = 1 << 30


def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", [None, [2, 0, 1], [4, 4], [4, 0, 3, 1, 2], [1, 2, 3, 4, 4]])
def test_entries_are_copied_and_cast(
    dtype: torch.dtype, given: torch.dtype, transposed: bool, order: list[int] | None
) -> None:
    source = values(5, 7, 9, dtype=given)
    source = source.transpose(1, 2) if transposed else source
    wanted = source if order is None else source[order]
    target = torch.full((*wanted.shape[:2], wanted.shape[2] + 3), torch.nan, dtype=dtype)
    copy_entries(target[:, :, :-3], source, None if order is None else torch.tensor(order))
    assert torch.equal(target[:, :, :-3], wanted.to(dtype))
    assert target[:, :, -3:].isnan().all(), "it wrote beside its target"


def test_nan_and_a_parameter_are_copied_as_they_are() -> None:
    source = torch.nn.Parameter(values(1, 2, 3, dtype=torch.float32))
    with torch.no_grad():
        source[0, 1, 2] = torch.nan
    for dtype in DTYPES:
        target = torch.zeros(1, 2, 3, dtype=dtype)
        copy_entries(target, source)
        assert torch.equal(target.isnan(), source.isnan())


@pytest.mark.parametrize("shape", [(2, 40, 2048), (1, 1, 100_000), (3, 0, 5), (0, 4, 5)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_no_copy_is_large_enough_for_torch_to_share_it_out(
    shape: tuple[int, int, int], given: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = torch.Tensor.copy_

    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(self.numel())
        return real(self, *args, **kwargs)

    source = values(*shape, dtype=given)
    target = torch.zeros(shape, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    copy_entries(target, source)
    assert max(sizes, default=0) < 32768
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
@pytest.mark.parametrize("num_bytes", [0, LARGE])
def test_every_item_is_worked_off_once(count: int, num_bytes: int) -> None:
    done: list[int] = []
    in_threads(done.append, range(count), num_bytes)
    assert sorted(done) == list(range(count))


def test_little_work_starts_no_thread_and_much_starts_a_few() -> None:
    seen: set[int] = set()

    def work(item: int) -> None:
        seen.add(threading.get_ident())

    in_threads(work, range(50), 1000)
    assert seen == {threading.get_ident()}
    in_threads(work, range(50), LARGE)
    assert len(seen) <= 1 + MAX_THREADS and usable_cores() >= 1


def test_threads_are_in_the_callers_inference_mode() -> None:
    with torch.inference_mode():
        target = torch.ones(100, 2)
        in_threads(lambda i: target[i].zero_(), range(100), LARGE)
    assert not target.any()
    target = torch.ones(100, 2)
    in_threads(lambda i: target[i].zero_(), range(100), LARGE)
    assert not target.any() and not target.is_inference()


def test_an_error_comes_out_when_all_threads_have_ended() -> None:
    def work(item: int) -> None:
        if item == 3:
            raise RuntimeError("item 3")

    before = threading.active_count()
    for num_bytes in (0, LARGE):
        with pytest.raises(RuntimeError, match="item 3"):
            in_threads(work, range(100), num_bytes)
        assert threading.active_count() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 9), (1, 3, 4), (4, 0, 3), (0, 2, 3)])
@pytest.mark.parametrize("room", [1, 2, 4, 5, 100])
def test_entries_are_transposed_where_they_lie(
    dtype: torch.dtype, shape: tuple[int, int, int], room: int
) -> None:
    n, rows, columns = shape
    matrix = values(*shape, dtype=dtype)
    wanted = matrix.transpose(1, 2).clone()
    transpose_entries(matrix, torch.empty(room * rows * columns + 1, dtype=dtype))
    assert torch.equal(matrix.view(n, columns, rows), wanted)
