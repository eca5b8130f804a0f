"""linear_lora on a CUDA device: real sizes, bf16, CUDA graphs and dependent launch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import GroupCase, random_case
from moegraft.backends.triton.linear_lora import (
    LinearTile,
    choose_tile,
    linear_lora,
    linear_lora_group,
)
from moegraft.backends.triton.linear_split import SplitTile, choose_split
from moegraft.backends.triton.token_segments import segments_by_counting, segments_by_sorting
from moegraft.sites import linear_site
from moegraft.testing import assert_bit_equal, poisoned_empty
from moegraft.types import TokenSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QKV = (
    linear_site("q_proj", 2048, 4096),
    linear_site("k_proj", 2048, 512),
    linear_site("v_proj", 2048, 512),
)


def has_dependent_launch() -> bool:
    """True on Hopper and newer."""
    return torch.cuda.get_device_capability() >= (9, 0)


@contextmanager
def no_sync() -> Iterator[None]:
    """Make everything in which the host waits for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(case: GroupCase, pdl: bool = False, tile: LinearTile | SplitTile | None = None) -> None:
    """Check one launch against the reference, on fresh segments and poisoned memory."""
    slots = TokenSlots(case.slots.slots, case.slots.live)

    def add(outs: list[torch.Tensor]) -> None:
        with poisoned_empty(), no_sync():
            linear_lora_group(case.x, case.tables, slots, outs, pdl=pdl, tile=tile)

    case.check(add)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 40, 130, 1100, 9000])
def test_a_group_with_odd_sizes_is_right(num_tokens: int, dtype: torch.dtype) -> None:
    check(random_case(num_tokens, dtype, "cuda"))


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256, 2048])
def test_a_group_with_real_sizes_is_right(num_tokens: int) -> None:
    case = random_case(num_tokens, torch.bfloat16, "cuda", sites=QKV)
    check(case)
    if has_dependent_launch():
        check(case, pdl=True)


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256])
def test_both_kernels_are_right_with_and_without_dependent_launch(num_tokens: int) -> None:
    case = random_case(num_tokens, torch.bfloat16, "cuda", sites=QKV)
    split = choose_split(num_tokens, 2048, 64)
    assert split is not None
    few = replace(split, shrink_programs=5, expand_programs=7)
    for tile in (split, few, choose_tile(num_tokens, 8, 5120, 64)):
        check(case, tile=tile)
        if has_dependent_launch():
            check(case, pdl=True, tile=tile)


def test_a_split_launch_gives_the_same_bits_each_time() -> None:
    case = random_case(40, torch.bfloat16, "cuda", sites=QKV)
    results = []
    for _ in range(50):
        outs = [base.clone() for base in case.bases]
        linear_lora_group(case.x, case.tables, case.slots, outs, pdl=has_dependent_launch())
        results.append(torch.cat(outs, 1))
    for other in results[1:]:
        assert_bit_equal(other, results[0])


#: A program that waits for ever is ended with its process.
TIME_LIMIT = 100


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_the_waits_of_split_launches_on_a_busy_gpu_neither_hang_nor_err() -> None:
    script = Path(__file__).parent / "linear_stress.py"
    paths = [str(script.parent), str(script.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"a program waited for ever, or the GPU is shared: {error}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok: " in done.stdout


def test_dependent_launch_changes_no_bit_over_many_layers() -> None:
    if not has_dependent_launch():
        pytest.skip("needs Hopper or newer")
    case = random_case(64, torch.bfloat16, "cuda", sites=(*QKV, linear_site("o", 2048, 2048)))
    results = []
    for pdl in (False, True):
        outs = [base.clone() for base in case.bases]
        slots = TokenSlots(case.slots.slots, case.slots.live)
        h = case.x.clone()
        for _ in range(50):  # each launch reads what the one before it wrote
            linear_lora_group(h, case.tables[:3], slots, outs[:3], pdl=pdl)
            linear_lora_group(outs[0][:, :2048], case.tables[3:], slots, outs[3:], pdl=pdl)
            h.copy_(outs[3]).clamp_(-4, 4)
        results.append(outs)
    for without, with_pdl in zip(*results, strict=True):
        assert_bit_equal(with_pdl, without)


def test_a_graph_serves_other_slots_at_each_replay() -> None:
    num_tokens = 33
    mixes = [
        [(7 * t) % 9 - 1 if t % 5 else 0 for t in range(num_tokens)],
        [-1] * num_tokens,
        [4] * num_tokens,
        [t % 8 - 1 for t in range(num_tokens)],
    ]
    mixes[0] = [min(s, 6) for s in mixes[0]]
    cases = [random_case(num_tokens, torch.bfloat16, "cuda", token_slots=mix) for mix in mixes]
    first = cases[3]
    x, outs = first.x.clone(), [base.clone() for base in first.bases]
    # Live on the host is only a bound here: the graph reads the slots on the device.
    slots = TokenSlots(first.slots.slots.clone(), first.slots.live)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        linear_lora_group(x, first.tables, slots, outs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear_lora_group(x, first.tables, slots, outs)
    for case in (*cases, *reversed(cases)):
        x.copy_(case.x)
        slots.slots.copy_(case.slots.slots)

        def replay(copies: list[torch.Tensor]) -> None:
            for out, copy in zip(outs, copies, strict=True):
                out.copy_(copy)
            graph.replay()
            for out, copy in zip(outs, copies, strict=True):
                copy.copy_(out)

        case.check(replay)


def test_a_nan_adapter_reaches_no_other_row() -> None:
    case = random_case(40, torch.bfloat16, "cuda", sites=QKV[:1])
    table, base = case.tables[0], case.bases[0]
    good = base.clone()
    linear_lora(case.x, table, case.slots, good)
    broken = table.factors(4)
    assert broken is not None
    for factor in broken.projections.values():
        factor.lora_B.fill_(torch.nan)  # a view of the arena
    bad = base.clone()
    linear_lora(case.x, table, case.slots, bad)
    rows = case.slots.slots != 4
    assert_bit_equal(bad[rows], good[rows], "rows of other adapters")
    assert bad[~rows].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 100, 3000])
def test_counted_and_sorted_segments_are_equal(num_tokens: int) -> None:
    slots = torch.randint(-1, 50, (num_tokens,), dtype=torch.int32, device="cuda")
    for rows in (16, 64):
        with no_sync():
            counted = segments_by_counting(slots, 50, rows)
            found = segments_by_sorting(slots, 50, rows)
        assert_bit_equal(counted.segments, found.segments)
        used = int((counted.segments[:, 2] >= 0).sum()) * rows
        assert_bit_equal(counted.order[:used], found.order[:used])


def test_rows_of_packed_columns_are_right() -> None:
    case = random_case(64, torch.bfloat16, "cuda", sites=QKV)
    packed = torch.cat(case.bases, 1)

    def add(outs: list[torch.Tensor]) -> None:
        views = packed.split([out.shape[1] for out in outs], 1)
        linear_lora_group(case.x, case.tables, replace(case.slots, cache={}), views)
        for view, out in zip(views, outs, strict=True):
            out.copy_(view)

    case.check(add)
