"""Groups of rank rows, what is shrunk by them, and the order of tokens, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moegraft.backends.triton.config import GemmConfig
from moegraft.backends.triton.device import is_interpreted
from moegraft.backends.triton.prefill.block_groups import run_block_groups
from moegraft.backends.triton.prefill.config import GROUP_RANKS, PrefillConfig
from moegraft.backends.triton.prefill.group_shrink import run_group_shrink
from moegraft.backends.triton.prefill.route import run_route
from moegraft.backends.triton.prefill.token_order import token_order
from moegraft.factor_table import SiteTable, site_table
from moegraft.sites import expert_site
from moegraft.testing import random_factors
from moegraft.testing.poison import poisoned_empty
from moegraft.types import TokenSlots

if not is_interpreted():
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 48, 2
KINDS = ("separate", "fused", "shared_outer")


def make_table(ranks: list[int]) -> SiteTable:
    """Return a table of one adapter per rank, of kinds in turn."""
    site = expert_site("experts", EXPERTS, HIDDEN, INTERMEDIATE)
    adapters = [
        random_factors(site, rank, KINDS[i % 3], seed=i)  # type: ignore[arg-type]
        for i, rank in enumerate(ranks)
    ]
    return site_table(site, adapters, torch.float32)


@pytest.mark.parametrize(
    ("block_m", "part_rows", "row_step"),
    [(32, 16, None), (32, 32, None), (192, 64, 16)],
)
@pytest.mark.parametrize("down", [False, True], ids=["gate_up", "down"])
@pytest.mark.parametrize("ranks", [[16, 3, 40, 20], [4] * 9])
def test_each_row_is_shrunk_by_its_own_adapter(
    ranks: list[int], down: bool, block_m: int, part_rows: int, row_step: int | None
) -> None:
    """Blocks of 192 rows are no power of two."""
    tokens = 70 if block_m < 192 else 420
    table = make_table(ranks)
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, 1).indices.to(torch.int32)
    each = [t * (len(ranks) + 1) // tokens - 1 for t in range(tokens)]
    slots = TokenSlots.of(each, "cpu")
    x = torch.randn(tokens, HIDDEN, generator=generator)
    tile = GemmConfig(part_rows, 32, 4, 1)
    config = PrefillConfig(block_m=block_m, shrink=tile, wide_shrink=tile)
    with poisoned_empty():
        order = token_order(slots, table.num_slots)
        rows = run_route(ids, order, EXPERTS, block_m, row_step=row_step)
        groups = run_block_groups(table, slots.slots, rows, TOP_K, block_m)
        h = torch.randn(rows.num_rows, INTERMEDIATE, generator=generator)
        given = h if down else x
        s = run_group_shrink(given, groups, down, rows, TOP_K, config)
    checked = 0
    for block in range(int(rows.live_blocks)):
        expert, count = divmod(int(rows.block_info[block]), 256)
        used: dict[int, None] = {}
        for row in range(block * block_m, block * block_m + count):
            token = int(rows.row_pair[row]) // TOP_K
            assert ids[token].eq(expert).any()
            if each[token] < 0:
                assert groups.row_segment[row] == -1
                continue
            used[each[token]] = None
            assert groups.row_segment[row] == len(used) - 1, "segments in the order of slots"
            factors = table.factors(each[token])
            assert factors is not None
            for side, name in enumerate(("down",) if down else ("gate", "up")):
                factor = factors.projections[name]
                lora_a = factor.lora_A[expert % factor.lora_A.shape[0]]
                first = side * groups.rank_rows
                rank, whole = factor.rank, -(-factor.rank // GROUP_RANKS) * GROUP_RANKS
                wanted = lora_a @ (h[row] if down else x[token]) * factor.scale
                torch.testing.assert_close(s[row, first : first + rank], wanted)
                assert not s[row, first + rank : first + whole].any(), "0 behind the live rank"
                checked += 1
        live = sum(-(-ranks[slot] // GROUP_RANKS) for slot in used)
        assert groups.counts[int(down), block] == live, "as many groups as ranks are live"
        assert groups.ready[int(down), block] == 0, "no S is there yet"
    assert checked > tokens


@pytest.mark.parametrize("tokens", [1, 5, 1023, 1025, 3000])
@pytest.mark.parametrize("num_slots", [1, 8, 64])
def test_tokens_come_in_the_order_of_their_slots(tokens: int, num_slots: int) -> None:
    slots = torch.randint(-1, num_slots, (tokens,), generator=torch.Generator().manual_seed(tokens))
    batch = TokenSlots(slots.to(torch.int32), tuple(range(num_slots)))
    with poisoned_empty(integers=True):
        found = token_order(batch, num_slots)
    assert torch.equal(found.long(), slots.sort(stable=True).indices)
    assert token_order(batch, num_slots) is found, "made once per step"


def test_numbers_that_are_no_slots_leave_a_permutation() -> None:
    slots = torch.tensor([3, -7, 2**31 - 1, 0, -1, 64, -(2**31), 1], dtype=torch.int32)
    with poisoned_empty(integers=True):
        found = token_order(TokenSlots(slots, (0, 1, 3)), 4)
    assert found[:6].tolist() == [1, 4, 6, 3, 7, 0], "none first, then slots 0, 1 and 3"
    assert sorted(found[6:].tolist()) == [2, 5]
