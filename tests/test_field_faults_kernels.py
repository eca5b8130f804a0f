"""Kinds of fault in kernels that users of MoE-LoRA systems have met, on both backends.

``docs/field-faults.md`` lists all kinds and where each is tested; many are in other files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moegraft import ops
from moegraft.adapters.foreign import stacked_pool
from moegraft.factor_table import SiteTable
from moegraft.factors import A_OFFSET, B_OFFSET
from moegraft.sites import expert_site
from moegraft.testing import LayerCase, assert_bit_equal, assert_close, layer_case, random_factors
from moegraft.types import LoraFactor, SiteFactors, TokenSlots, WeightLayout
from ops_cases import BACKENDS, HostDelta, check_case, interpreted, ops_case, routed, run_case

on_both = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", [pytest.param("triton", marks=interpreted)])


def one_adapter(rank: int, **sizes: int) -> LayerCase:
    """Five tokens, of which three use an adapter of some rank."""
    full = {"num_experts": 3, "hidden": 24, "intermediate": 16, **sizes}
    site = expert_site("experts", full["num_experts"], full["hidden"], full["intermediate"])
    return layer_case(5, [random_factors(site, rank)], [0, -1, 0, 0, -1], **full)  # type: ignore[arg-type]


@on_both
def test_padding_of_a_block_reads_and_writes_no_real_row(backend: str) -> None:
    case = ops_case(3, minus_ones=0.0)
    good = run_case(case, backend)
    x = case.x.clone()
    x[0] = torch.nan
    found = run_case(replace(case, x=x), backend)
    assert_bit_equal(found[1:], good[1:])
    assert bool(found[0].isnan().all())


@on_both
def test_any_rank_small_odd_or_large(backend: str) -> None:
    for rank in (1, 2, 7, 8, 12, 17, 65, 130):
        check_case(one_adapter(rank), backend)


@on_both
@pytest.mark.parametrize("num_experts", [1, 60, 65, 160])
def test_any_number_of_experts(num_experts: int, backend: str) -> None:
    check_case(one_adapter(3, num_experts=num_experts, hidden=8, intermediate=8), backend)


@on_both
@pytest.mark.parametrize(("hidden", "intermediate"), [(72, 8), (8, 72), (17, 5)])
def test_experts_narrower_or_wider_than_the_model(
    hidden: int, intermediate: int, backend: str
) -> None:
    check_case(one_adapter(4, hidden=hidden, intermediate=intermediate), backend)


@on_both
def test_half_of_the_experts_elsewhere_and_all_memory_poisoned(backend: str) -> None:
    case = ops_case(9, minus_ones=0.0, num_experts=6, adapters=[])
    half = replace(case.weights, gate_up=case.weights.gate_up[3:], down=case.weights.down[3:])
    site = expert_site("experts", 3, half.hidden, half.intermediate)
    adapters = (random_factors(site, 4), random_factors(site, 5, seed=1))
    here = replace(
        case, weights=half, adapters=adapters, token_slots=(0, 1, -1) * 3, expert_offset=3
    )
    elsewhere = (here.routing.topk_ids < 3).all(1)
    assert bool((here.routing.topk_ids < 3).any()) and bool((here.routing.topk_ids >= 3).any())
    check_case(here, backend)
    assert bool((run_case(here, backend)[elsewhere] == 0).all())


@on_both
def test_rank_vectors_that_cancel_are_as_exact_as_the_dtype_allows(backend: str) -> None:
    # s_r of +1000 and -1000 with nearly the same B: rounding s to 16 bits would leave noise alone.
    dtype = torch.float16 if backend == "triton" else torch.bfloat16
    case = one_adapter(16)
    generator = torch.Generator().manual_seed(3)
    adapter = case.adapters[0]
    assert adapter is not None
    factors = {}
    for name, factor in adapter.projections.items():
        a, b = factor.lora_A.clone(), factor.lora_B.clone()
        a[:, 8:] = -a[:, :8] + 2e-3 * torch.randn(a[:, :8].shape, generator=generator)
        b[:, :, 8:] = b[:, :, :8]
        factors[name] = LoraFactor((a * 30).to(dtype), b.to(dtype), factor.scale)
    weights = case.weights
    exact = replace(
        case,
        x=case.x.to(dtype),
        weights=replace(weights, gate_up=weights.gate_up.to(dtype), down=weights.down.to(dtype)),
        adapters=(SiteFactors(factors),),
    )
    assert_close(run_case(exact, backend), exact.reference(), dtype)


@on_both
def test_offsets_past_two_to_the_31_elements(backend: str) -> None:
    """Rows, experts and slots 2**30 elements apart: pages in between are never touched."""
    case = ops_case(3, dtype=torch.float16, adapters=[])
    far = 2**30

    def spread(tensor: torch.Tensor, stride: int = far) -> torch.Tensor:
        strides = (stride, *tensor[0].contiguous().stride())
        size = (tensor.shape[0] - 1) * stride + tensor[0].numel()
        view = torch.empty(size, dtype=tensor.dtype).as_strided(tensor.shape, strides)
        return view.copy_(tensor)

    generator = torch.Generator().manual_seed(0)
    a, b, c = (0.2 * torch.randn(3, 5, 3, n, generator=generator) for n in (40, 40, 24))
    d, e, f = (0.2 * torch.randn(3, 5, n, 3, generator=generator) for n in (24, 24, 40))
    values = [t.half() for t in (a, b, c, d, e, f)]
    adapters = tuple(
        SiteFactors(
            {
                "gate": LoraFactor(values[0][s], values[3][s], 1.0),
                "up": LoraFactor(values[1][s], values[4][s], 1.0),
                "down": LoraFactor(values[2][s], values[5][s], 1.0),
            }
        )
        for s in range(3)
    )
    case = replace(case, adapters=adapters, token_slots=(2, 1, 2))
    gate_a, up_a, down_a = (spread(t) for t in values[:3])
    pool = stacked_pool(case.site, (gate_a, up_a), (values[3], values[4]), down_a, values[5])
    for slot in range(3):
        pool.load(slot, 3)
    weights = replace(
        case.weights, gate_up=spread(case.weights.gate_up), down=spread(case.weights.down)
    )
    wide = replace(case, x=spread(case.x), weights=weights)
    out = spread(torch.zeros_like(case.x))
    args = (wide.x, case.routing.topk_ids, case.routing.topk_weights, weights, pool.table)
    ops.moe_lora(*args, case.slots(), out=out, backend=backend)
    assert_close(out, case.reference(), torch.float16)


@on_both
def test_rows_to_sum_past_two_to_the_31_elements(backend: str) -> None:
    hidden, num_rows = 64, 2**31 // 64 + 4
    rows = torch.empty(num_rows, hidden, dtype=torch.float16)
    index = torch.tensor([num_rows - 1, 0, num_rows - 3, -1], dtype=torch.int32)
    rows[index[:3].long()] = torch.randn(3, hidden).half()
    weights = torch.tensor([[0.5, 0.25], [1.0, torch.nan]])
    found = ops.finalize_moe_lora(rows, weights, index, backend=backend)
    first = 0.5 * rows[num_rows - 1].double() + 0.25 * rows[0].double()
    wanted = torch.stack((first, rows[num_rows - 3].double()))
    assert_close(found, wanted, torch.float16)


@on_both
def test_a_base_batch_reads_nothing_of_the_adapters(backend: str) -> None:
    case = ops_case(6)
    wild = _with_wild_offsets(case.table(), range(4))
    assert_bit_equal(run_case(case, backend, None, wild), run_case(case, backend, None))
    assert_bit_equal(
        run_case(case, backend, TokenSlots.of([-1] * 6), wild), run_case(case, backend, None)
    )


@on_kernels
def test_slots_that_no_token_uses_cost_and_change_nothing(backend: str) -> None:
    case = replace(ops_case(6), token_slots=(1, -1, 1, 1, -1, 1))
    wild = _with_wild_offsets(case.table(), (0, 2, 3))
    assert_bit_equal(run_case(case, backend, table=wild), run_case(case, backend))


def _with_wild_offsets(table: SiteTable, slots: Any) -> SiteTable:
    """Let slots point where any read ends the process."""
    for slot in slots:
        table.records[slot][:, [A_OFFSET, B_OFFSET]] = 2**50
    return table


@on_both
def test_a_delta_of_pairs_that_are_not_local_is_never_read(backend: str) -> None:
    case = ops_case(6, layout=WeightLayout("up_first"), scale=2.0)
    ids = case.routing.topk_ids
    assert bool((ids < 0).any())
    delta = HostDelta.of(case)
    assert bool(delta.gate_up[ids < 0].isnan().all())
    out = routed(case, gate_up_lora_delta=delta.gate_up, backend=backend)
    assert bool(out.isfinite().all())
    h = torch.zeros(*ids.shape, 24)
    down = delta.down(h, weighted=True)
    assert bool(down[ids < 0].isnan().all())
    ops.add_down_delta(out, down, ids, local_num_experts=5, backend=backend)
    assert bool(out.isfinite().all())


def test_tiles_fit_a_device_with_little_shared_memory() -> None:
    pytest.importorskip("triton")
    from moegraft.backends.triton.device import DeviceFacts
    from moegraft.backends.triton.tiles import choose_config, config_ok
    from moegraft.problem import Problem

    for shared_memory in (65_536, 101_376, 232_448):
        device = DeviceFacts("small", 80, 40, shared_memory)
        for dtype in ("bfloat16", "float32"):
            for num_tokens in (1, 7, 64, 500, 4000):
                for rank in (0, 8, 128, 256):
                    problem = Problem(
                        num_tokens, 8, 128, 4096, 1536, True, dtype, "unquantized", "cuda", rank
                    )
                    config, _ = choose_config(problem, device)
                    assert config_ok(config, problem, device), (shared_memory, problem)
