"""Whole layers on a CUDA device: every mode against the reference, in bf16 and fp16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from layer_cases import (
    ALL_MODES,
    CONFIG,
    FEW_PROGRAMS,
    MERGED,
    TWO_MODES,
    GpuCase,
    mixed_adapters,
    mixed_case,
    run_mode,
)

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.stages import TritonStages
from moegraft.backends.triton.workspace import MAX_PAIRS
from moegraft.call import Mode
from moegraft.factor_table import Arena, SiteTable
from moegraft.factors import UNIT_BYTES, TableLayout
from moegraft.layer import run_stages
from moegraft.packing import pack_adapter
from moegraft.testing import (
    ACTIVATIONS,
    LAYOUTS,
    LayerCase,
    assert_bit_equal,
    assert_case,
    assert_close,
    assert_delta_close,
    layer_case,
    poisoned_empty,
    random_factors,
)
from moegraft.types import SiteFactors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64, 257])
def test_bf16_in_every_mode(num_tokens: int) -> None:
    GpuCase(mixed_case(num_tokens, minus_ones=0.05, scale=1.5)).check()


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_fp16(num_tokens: int) -> None:
    GpuCase(mixed_case(num_tokens, FP16, minus_ones=0.05)).check(TWO_MODES)


def test_a_thousand_tokens_and_int64_ids() -> None:
    case = mixed_case(1000)
    ids = case.routing.topk_ids.long()
    GpuCase(replace(case, routing=replace(case.routing, topk_ids=ids))).check(TWO_MODES)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_all_tokens_on_one_expert(dtype: torch.dtype) -> None:
    case = mixed_case(64, dtype)
    ids = torch.full_like(case.routing.topk_ids, 3)
    found = GpuCase(replace(case, routing=replace(case.routing, topk_ids=ids)))
    found.check(ALL_MODES if dtype == BF16 else TWO_MODES)


def test_experts_of_other_ranks_and_dropped_pairs_contribute_nothing() -> None:
    case = mixed_case(64, minus_ones=0.3, expert_offset=4)
    ids = case.routing.topk_ids
    ids = torch.where(ids == 9, 99, torch.where(ids == 6, 1, ids))  # experts 4 to 11 are local
    case = replace(case, routing=replace(case.routing, topk_ids=ids))
    found = GpuCase(case).check()
    dropped = torch.full_like(case.routing.topk_ids, -1)
    nothing = GpuCase(replace(case, routing=replace(case.routing, topk_ids=dropped)))
    for mode in ALL_MODES:
        assert_bit_equal(nothing.run(mode), torch.zeros_like(found[mode]), "no local pair")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_odd_sizes(dtype: torch.dtype) -> None:
    modes: tuple[Mode, ...] = TWO_MODES if dtype == BF16 else ("in_kernel",)
    GpuCase(mixed_case(64, dtype, sizes=(7, 131, 77), biases=True)).check(modes)


def test_the_plain_stages_composed_match_the_reference_and_the_modes() -> None:
    case = mixed_case(64, minus_ones=0.1)
    gpu = GpuCase(case)
    with poisoned_empty():
        with_lora, base = (run_stages(TritonStages(CONFIG), gpu.call(b)) for b in (False, True))
    assert_close(with_lora, case.reference(), BF16)
    assert_delta_close(with_lora, base, case.reference(), case.reference(base=True))
    assert_close(gpu.run("serial"), with_lora, BF16)


@pytest.mark.parametrize(
    ("layout", "activation"),
    [("interleaved_in_major", "clamped"), ("no_gate", "relu2"), ("up_first", "gelu_tanh")],
)
def test_layouts_activations_and_biases(layout: str, activation: str) -> None:
    case = mixed_case(
        64, layout=LAYOUTS[layout], activation=ACTIVATIONS[activation], biases=True, minus_ones=0.1
    )
    GpuCase(case).check(TWO_MODES)


def test_an_activation_that_is_a_function_runs_in_the_unfused_modes() -> None:
    case = mixed_case(64, activation=ACTIVATIONS["custom"], minus_ones=0.1)
    GpuCase(case).check(("two_stream", "serial"))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_nan_adapter_reaches_no_other_row(mode: Mode) -> None:
    case = mixed_case(64)
    good = GpuCase(case).run(mode)
    for slot in (1, 7):
        held = list(case.adapters)
        broken = held[slot]
        assert broken is not None
        held[slot] = SiteFactors(
            {
                name: replace(factor, lora_A=torch.full_like(factor.lora_A, torch.nan))
                for name, factor in broken.projections.items()
            }
        )
        bad = GpuCase(replace(case, adapters=tuple(held))).run(mode)
        rows = torch.tensor([s != slot for s in case.token_slots])
        assert_bit_equal(bad[rows], good[rows], "rows of other adapters")
        assert bad[~rows].isnan().all()


@pytest.mark.parametrize("config", [MERGED, FEW_PROGRAMS], ids=["merged", "few programs"])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_where_the_delta_is_computed_changes_no_bit(num_tokens: int, config: FusedConfig) -> None:
    case = mixed_case(num_tokens)
    wanted = GpuCase(case).run("in_kernel")
    found = GpuCase(case, config)
    for _ in range(20):
        assert_bit_equal(found.run("in_kernel"), wanted)
    assert_bit_equal(found.run("fused_serial"), wanted)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_plans_own_tiles(mode: Mode) -> None:
    sizes = {"num_experts": 16, "hidden": 512, "intermediate": 256, "top_k": 4}
    case = layer_case(48, (), (0, 1, -1, 2), dtype=BF16, device="cuda", **sizes)
    held = [random_factors(case.site, r, seed=r, dtype=BF16) for r in (16, 7, 12)]
    case = replace(case, adapters=tuple(held))
    layer = case.layer(mode=mode)
    assert layer.plan(48, 4).mode == mode
    assert_case(case, layer)


def test_more_pairs_than_one_round_of_launches_takes_run_in_pieces() -> None:
    small = mixed_case(61)
    repeats = MAX_PAIRS // (61 * 2) + 20
    routing = replace(
        small.routing,
        topk_ids=small.routing.topk_ids.repeat(repeats, 1),
        topk_weights=small.routing.topk_weights.repeat(repeats, 1),
    )
    large = replace(
        small,
        x=small.x.repeat(repeats, 1),
        routing=routing,
        token_slots=small.token_slots * repeats,
    )
    assert large.routing.topk_ids.numel() > MAX_PAIRS
    for mode in TWO_MODES:
        found, wanted = GpuCase(large).run(mode), GpuCase(small).run(mode)
        assert_bit_equal(found, wanted.repeat(repeats, 1), f"{mode}: every copy of a token")


def far_away(case: LayerCase) -> tuple[LayerCase, SiteTable]:
    """Return the same case with weights and factors beyond 2**31 elements of their tensors."""
    w = case.weights
    step = 2**30 + 64  # three steps are past 2**31, one is not
    room = w.gate_up[0].numel() + w.down[0].numel()
    memory = torch.empty(step * (w.num_experts - 1) + room, dtype=w.dtype, device="cuda")
    shapes = (tuple(w.gate_up.shape), tuple(w.down.shape))
    gate_up = memory.as_strided(shapes[0], (step, shapes[0][2], 1))
    down = memory.as_strided(shapes[1], (step, shapes[1][2], 1), w.gate_up[0].numel())
    gate_up.copy_(w.gate_up)
    down.copy_(w.down)
    adapter = case.adapters[0]
    assert adapter is not None
    layout = TableLayout.of([case.site])
    packed = pack_adapter({case.site.name: adapter}, layout, w.dtype)
    start = 2**31 + 2**20
    arena = torch.empty(start + packed.data.numel() + 8, dtype=w.dtype, device="cuda")
    arena[start : start + packed.data.numel()] = packed.data.cuda()
    unit = UNIT_BYTES // w.dtype.itemsize
    row = packed.relocated(start // unit, layout)[None].cuda()
    records, expert_map = layout.records(row, case.site), layout.expert_map(row, case.site)
    table = SiteTable(case.site, Arena(arena), records, expert_map, packed.max_rank)
    return replace(case, weights=replace(w, gate_up=gate_up, down=down)), table


def test_offsets_past_two_to_the_31_elements_find_weights_and_factors() -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory")
    case = layer_case(
        16, (), (0, -1, 0), num_experts=4, hidden=256, intermediate=128, dtype=BF16, device="cuda"
    )
    case = replace(case, adapters=(random_factors(case.site, 20, seed=1, dtype=BF16),))
    assert int(case.routing.topk_ids.max()) == 3
    far, table = far_away(case)
    for mode in TWO_MODES:
        near = GpuCase(case)
        call = replace(near.call(), weights=far.weights, table=table)
        assert_bit_equal(run_mode(call, mode, CONFIG), near.run(mode), mode)
    del far, table, call
    torch.cuda.empty_cache()


def test_every_slot_empty_is_the_base() -> None:
    case = mixed_case(64)
    empty = replace(case, adapters=(None,) * len(case.adapters))
    for mode in TWO_MODES:
        gpu = GpuCase(empty)
        assert_bit_equal(gpu.run(mode), gpu.run(mode, base=True), mode)
    assert len(mixed_adapters(case.site, BF16)) == len(case.adapters)
