"""linear_lora on the GPU, in Triton's interpreter: the same code, run on the CPU."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start", allow_module_level=True)

from linear_cases import random_case
from moegraft.backends.triton.linear_lora import (
    LinearTile,
    choose_tile,
    linear_lora,
    linear_lora_group,
)
from moegraft.backends.triton.linear_split import SplitTile, choose_split
from moegraft.backends.triton.token_segments import (
    max_segments,
    segments_by_counting,
    segments_by_sorting,
    token_segments,
)
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.reference import linear_lora_reference
from moegraft.sites import linear_site
from moegraft.testing import (
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    poisoned_empty,
    random_activations,
    random_factors,
)
from moegraft.types import LoraFactor, SiteFactors, TokenSlots

TILE = LinearTile(16, 16, 2, 16, 32)
#: Two parts of K of two steps each, and fewer programs than units.
SPLIT = SplitTile(32, 16, 16, 128, shrink_programs=3, expand_programs=5)
TILES = pytest.mark.parametrize("tile", [TILE, SPLIT], ids=["one_program", "split"])
SITE = linear_site("o_proj", 40, 72)
RANKS = (1, 3, 8, 16, 20, 33, 128)


def adapters(dtype: torch.dtype = torch.float32) -> list[SiteFactors | None]:
    """Return slots of all ranks, two empty ones, and one of rank 0."""
    found = [random_factors(SITE, rank, scale=0.3 * rank, seed=rank, dtype=dtype) for rank in RANKS]
    return [*found[:3], None, *found[3:], random_factors(SITE, 0, dtype=dtype), None]


def run(
    x: torch.Tensor, held: Sequence[SiteFactors | None], slots: list[int], base: torch.Tensor,
    tile: LinearTile | SplitTile | None = TILE,
) -> torch.Tensor:  # fmt: skip
    """Return base with the deltas added, on factors in x's dtype."""
    out = base.clone()
    with poisoned_empty(integers=True):
        table = site_table(SITE, held, x.dtype)
        linear_lora_group(x, [table], TokenSlots.of(slots), [out], tile=tile)
    return out


@TILES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 16, 17, 40, 130])
def test_every_row_gets_its_own_adapters_delta(
    num_tokens: int, dtype: torch.dtype, tile: LinearTile | SplitTile
) -> None:
    held = adapters(dtype)
    draw = random.Random(num_tokens)
    slots = [draw.randrange(-1, len(held)) for _ in range(num_tokens)]
    x = random_activations(num_tokens, 40, dtype)
    base = random_activations(num_tokens, 72, dtype, seed=1)
    delta = linear_lora_reference(x, held, slots, 72, torch.float64)
    idle = torch.tensor([s < 0 or held[s] is None or s == 8 for s in slots], dtype=torch.bool)
    x[torch.tensor([s < 0 for s in slots], dtype=torch.bool)] = torch.nan
    out = run(x, held, slots, base, tile)
    assert_close(out, base.double() + delta, dtype)
    assert_delta_close(out, base, base.double() + delta, base.double())
    assert_bit_equal(out[idle], base[idle], "rows without a delta")


@pytest.mark.parametrize("rank", RANKS)
def test_the_delta_alone_is_right_for_rank(rank: int) -> None:
    held = [None, random_factors(SITE, rank, seed=rank)]
    x = random_activations(21, 40, torch.float32)
    zeros = torch.zeros(21, 72)
    expected = linear_lora_reference(x, held, [1] * 21, 72, torch.float64)
    for tile in (TILE, replace(TILE, block_r=64), SPLIT, None):
        assert_close(run(x, held, [1] * 21, zeros, tile), expected, torch.float32)


@TILES
@pytest.mark.parametrize("num_tokens", [7, 40])
def test_a_group_of_three_with_odd_and_different_sizes_is_right(
    num_tokens: int, tile: LinearTile | SplitTile
) -> None:
    case = random_case(num_tokens, torch.float32, "cpu")
    case.check(lambda outs: linear_lora_group(case.x, case.tables, case.slots, outs, tile=tile))


@TILES
def test_strided_rows_of_x_and_columns_of_one_packed_output_are_right(
    tile: LinearTile | SplitTile,
) -> None:
    case = random_case(19, torch.float32, "cpu")
    wide = torch.full((19, 3 * case.x.shape[1]), torch.nan)
    x = wide[:, 5 : 5 + case.x.shape[1]]
    x.copy_(case.x)
    sizes = [base.shape[1] for base in case.bases]
    packed = torch.full((19, sum(sizes) + 3), torch.nan)

    def add(outs: list[torch.Tensor]) -> None:
        views = list(packed[:, : sum(sizes)].split(sizes, 1))
        for view, out in zip(views, outs, strict=True):
            view.copy_(out)
        linear_lora_group(x, case.tables, case.slots, views, tile=tile)
        for view, out in zip(views, outs, strict=True):
            out.copy_(view)

    case.check(add)
    assert packed[:, sum(sizes) :].isnan().all()


@TILES
def test_more_linears_than_one_launch_takes_and_tables_of_several_banks_are_right(
    tile: LinearTile | SplitTile,
) -> None:
    one, other = random_case(9, torch.float32, "cpu"), random_case(9, torch.float32, "cpu", seed=9)
    tables, slots = (*one.tables, *other.tables), one.slots
    outs = [base.clone() for base in (*one.bases, *other.bases)]
    linear_lora_group(one.x, tables, slots, outs, tile=tile)
    alone = [base.clone() for base in (*one.bases, *other.bases)]
    for table, out in zip(tables, alone, strict=True):
        linear_lora_group(one.x, [table], slots, [out], tile=tile)
    for a, b in zip(outs, alone, strict=True):
        assert_bit_equal(a, b)


def test_one_output_column_and_a_transposed_single_row_are_right() -> None:
    site = linear_site("gate", 40, 1, "router")
    held = [random_factors(site, 4)]
    x = random_activations(40, 1, torch.float32).t()
    out = torch.zeros(1, 1)
    linear_lora(x, site_table(site, held), TokenSlots.of([0]), out)
    assert_close(out, linear_lora_reference(x, held, [0], 1, torch.float64), torch.float32)
    row = torch.zeros(72, 1).t()
    linear_lora(x, site_table(SITE, adapters()), TokenSlots.of([2]), row)
    expected = linear_lora_reference(x, adapters(), [2], 72, torch.float64)
    assert_close(row, expected, torch.float32)


@TILES
def test_an_fp32_router_over_a_16_bit_bank_is_right(tile: LinearTile | SplitTile) -> None:
    held = adapters(torch.float16)
    x, out = random_activations(6, 40, torch.float32), torch.zeros(6, 72)
    slots = [0, 2, -1, 4, 5, 1]
    table = site_table(SITE, held, torch.float16)
    linear_lora_group(x, [table], TokenSlots.of(slots), [out], tile=tile)
    assert_close(out, linear_lora_reference(x, held, slots, 72, torch.float64), torch.float32)


@TILES
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_a_nan_adapter_reaches_no_other_row(matrix: str, tile: LinearTile | SplitTile) -> None:
    held, slots = adapters(), [0, 1, -1, 2, 1, 4, 4, 1]
    x = random_activations(8, 40, torch.float32)
    base = random_activations(8, 72, torch.float32, seed=1)
    factor = held[1].projections["linear"]  # type: ignore[union-attr]
    nan = torch.full_like(getattr(factor, matrix), torch.nan)
    bad = [*held]
    bad[1] = SiteFactors({"linear": replace(factor, **{matrix: nan})})
    good_out, bad_out = run(x, held, slots, base, tile), run(x, bad, slots, base, tile)
    rows = torch.tensor(slots) != 1
    assert_bit_equal(bad_out[rows], good_out[rows], "rows of other adapters")
    assert bad_out[~rows].isnan().all()


@TILES
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(tile: LinearTile | SplitTile) -> None:
    held, x = adapters(), random_activations(40, 40, torch.float32)
    base = random_activations(40, 72, torch.float32, seed=1)
    mixed = [(t % 11) - 1 for t in range(40)]
    whole = run(x, held, mixed, base, tile)
    for slot in (0, 4, 7):
        alone = run(x, held, [s if s == slot else -1 for s in mixed], base, tile)
        rows = torch.tensor(mixed) == slot
        assert_bit_equal(alone[rows], whole[rows], f"rows of slot {slot}")


def test_the_bits_do_not_depend_on_how_many_programs_there_are() -> None:
    case = random_case(40, torch.float32, "cpu")
    results = []
    for shrink, expand in ((1, 1), (7, 2), (1000, 1000)):
        outs = [base.clone() for base in case.bases]
        tile = replace(SPLIT, shrink_programs=shrink, expand_programs=expand)
        linear_lora_group(case.x, case.tables, case.slots, outs, tile=tile)
        results.append(torch.cat(outs, 1))
    for other in results[1:]:
        assert_bit_equal(other, results[0])


def test_no_launch_of_a_step_takes_what_an_earlier_one_left() -> None:
    case = random_case(40, torch.float32, "cpu")
    other = random_case(40, torch.float32, "cpu", seed=5, token_slots=case.slots.slots.tolist())
    for turn in range(5):  # all share one TokenSlots, and so one workspace
        for one in (case, other):
            x = one.x * (turn + 1)
            outs = [torch.zeros_like(base) for base in one.bases]
            linear_lora_group(x, one.tables, case.slots, outs, tile=SPLIT)
            for out, delta in zip(outs, one.deltas, strict=True):
                assert_close(out, delta * (turn + 1), torch.float32)
        linear_lora_group(case.x, case.tables[:1], case.slots, [torch.zeros(40, 67)], tile=SPLIT)


def test_an_adapter_whose_rank_vectors_are_the_mark_of_an_empty_word_ends() -> None:
    factor = LoraFactor(torch.ones(1, 1, 40), torch.ones(1, 72, 1), 1.0)
    x = torch.full((2, 40), -1, dtype=torch.int32).view(torch.float32)  # a NaN
    held: list[SiteFactors | None] = [SiteFactors({"linear": factor})]
    assert run(x, held, [0, -1], torch.zeros(2, 72), SPLIT)[0].isnan().all()


def test_columns_that_are_not_adjacent_are_refused() -> None:
    table, x = site_table(SITE, adapters()), torch.zeros(2, 40)
    with pytest.raises(MoegraftError, match=r"out \(2, 72\) are 2 elements apart"):
        linear_lora(x, table, TokenSlots.of([0, 0]), torch.zeros(72, 2).t())


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 130, 300])
def test_segments_hold_each_token_once_in_order(num_tokens: int, rows: int) -> None:
    for num_slots in (1, 3, 40):
        draw = random.Random(num_tokens * 100 + num_slots)
        slots = [draw.randrange(-1, num_slots + 1) for _ in range(num_tokens)]  # one too large
        tensor = torch.tensor(slots, dtype=torch.int32)
        with poisoned_empty(integers=True):
            counted = segments_by_counting(tensor, num_slots, rows)
            sorted_ = segments_by_sorting(tensor, num_slots, rows)
        found = []
        for g, (start, end, slot, _) in enumerate(counted.segments.tolist()):
            assert 0 <= end - start <= rows
            assert (end > start == g * rows) or (start, end, slot) == (0, 0, -1)
            if slot >= 0:
                assert (counted.order[end : (g + 1) * rows] == -1).all()
            found += [(slot, t) for t in counted.order[start:end].tolist()]
        expected = sorted((s, t) for t, s in enumerate(slots) if 0 <= s < num_slots)
        assert found == expected
        assert_bit_equal(counted.segments, sorted_.segments, "counted and sorted segments")
        used = int((counted.segments[:, 2] >= 0).sum()) * rows
        assert_bit_equal(counted.order[:used], sorted_.order[:used], "orders")


def test_the_number_of_segments_suffices_for_any_mix() -> None:
    draw = random.Random(0)
    for _ in range(300):
        num_slots, rows = draw.randrange(1, 9), draw.choice([1, 2, 16])
        counts = [draw.randrange(40) for _ in range(num_slots)]
        needed = sum(-(-n // rows) for n in counts)
        assert needed <= max_segments(sum(counts), num_slots, rows)
    assert max_segments(5, 64, 16) == 5
    assert max_segments(64, 8, 16) == 11


def test_a_step_makes_its_segments_once() -> None:
    slots = TokenSlots.of([0, 1, -1])
    assert token_segments(slots, 2, 16) is token_segments(slots, 2, 16)
    assert token_segments(slots, 3, 16) is not token_segments(slots, 2, 16)


def test_few_tokens_and_ranks_are_split_and_others_are_not() -> None:
    tile = choose_split(64, 4096, 16)
    assert tile is not None and tile.chunk * 8 == 4096
    assert choose_split(4096, 4096, 16) is None
    assert choose_split(64, 4096, 129) is None
    assert choose_split(64, 4096, 17, itemsize=4) is None


def test_few_tokens_get_narrow_tiles_and_many_get_wide_ones() -> None:
    widths = [
        tile.block_n * tile.pieces
        for tile in (choose_tile(t, 8, 5120, 16) for t in (1, 16, 64, 512, 8192))
    ]
    assert widths == sorted(widths)
    assert widths[0] == 128
    assert widths[-1] == 512
    assert choose_tile(64, 8, 5120, 128).pieces == 1
