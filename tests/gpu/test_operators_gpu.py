"""The operators on a CUDA device as torch sees them, and tables over an engine's tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moegraft import ops
from moegraft.adapters.foreign import packed_pool, stacked_pool
from moegraft.ops.moe_lora import format_arguments
from moegraft.testing import assert_bit_equal, assert_close, assert_delta_close
from moegraft.types import LoraFactor, SiteFactors
from ops_cases import HostDelta, gpu_case, routed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def test_opcheck_finds_nothing_on_the_gpu() -> None:
    case = gpu_case(5)
    w, ids, table, slots = case.weights, case.routing.topk_ids, case.table(), case.slots()
    delta = HostDelta.of(case).gate_up.nan_to_num().flatten(0, 1)
    h = torch.zeros(ids.numel(), 128, dtype=BF16, device="cuda")
    rows = torch.zeros(ids.numel(), 256, dtype=BF16, device="cuda")
    index = torch.zeros(ids.numel(), dtype=torch.int32, device="cuda")
    args = (
        case.x, ids, case.routing.topk_weights, w.gate_up, w.down, *format_arguments(w),
        delta, "gate_first", "silu", None, 1.0, 0.0, 0,
    )  # fmt: skip
    end, out = (0, 0, True, ""), torch.zeros_like(case.x)
    moegraft = torch.ops.moegraft
    torch.library.opcheck(moegraft.routed_moe_lora, (*args, 1.5, *end, out, h))
    torch.library.opcheck(moegraft.routed_moe_lora_rows, (*args, *end, rows, index, None))
    moegraft.routed_moe_lora_rows(*args, *end, rows, index, None)
    down = torch.ones(*ids.shape, 256, device="cuda")
    args = (rows, case.routing.topk_weights, index, down, 1.5, "")
    torch.library.opcheck(moegraft.finalize_moe_lora, (*args, out))
    torch.library.opcheck(moegraft.add_down_delta, (out, down, ids, 0, 8, 1.5, ""))
    args = (
        case.x, ids, case.routing.topk_weights, w.gate_up, w.down, *format_arguments(w),
        None, None, table.arena.data,
        table.records, table.expert_map, slots.slots, list(slots.live), False, "gate_first", True,
        "silu", None, 1.0, 0.0, table.max_rank, 0, 1.5, "", "", out,
    )  # fmt: skip
    torch.library.opcheck(moegraft.moe_lora, args)


def test_one_graph_in_torch_compile() -> None:
    case = gpu_case(5)
    table, slots, routing = case.table(), case.slots(), case.routing

    def step(x: torch.Tensor) -> torch.Tensor:
        args = (2 * x, routing.topk_ids, routing.topk_weights, case.weights, table, slots)
        out = ops.moe_lora(*args)
        return out + routed(case)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(case.x)
    assert_bit_equal(found, step(case.x))


def test_tables_over_an_engines_tensors() -> None:
    case = gpu_case(40, adapters=[])
    generator = torch.Generator().manual_seed(0)

    def fill(*sizes: int) -> torch.Tensor:
        return (0.1 * torch.randn(3, 8, *sizes, generator=generator)).to(BF16).cuda()

    gate_a, up_a, down_a = fill(16, 256), fill(16, 256), fill(16, 128)
    gate_b, up_b, down_b = fill(128, 16), fill(128, 16), fill(256, 16)
    ranks = (16, 5, 1)

    def factor(a: torch.Tensor, b: torch.Tensor, s: int) -> LoraFactor:
        return LoraFactor(a[s, :, : ranks[s]], b[s, ..., : ranks[s]], 2.0)

    adapters = tuple(
        SiteFactors(
            {
                "gate": factor(gate_a, gate_b, s),
                "up": factor(up_a, up_b, s),
                "down": factor(down_a, down_b, s),
            }
        )
        for s in range(3)
    )
    packed_a = torch.full((3, 8, 32, 256), torch.nan, dtype=BF16, device="cuda")
    for s, rank in enumerate(ranks):
        packed_a[s, :, :rank] = gate_a[s, :, :rank]
        packed_a[s, :, rank : 2 * rank] = up_a[s, :, :rank]
    pools = (
        stacked_pool(case.site, (gate_a, up_a), (gate_b, up_b), (down_a,), (down_b,)),
        packed_pool(case.site, packed_a, torch.cat((gate_b, up_b), 2), down_a, down_b),
    )
    object.__setattr__(case, "adapters", adapters)
    object.__setattr__(case, "token_slots", (0, 1, -1, 2) * 10)
    args = (case.x, case.routing.topk_ids, case.routing.topk_weights, case.weights)
    ref_with, ref_base = case.reference(), case.reference(base=True)
    base = ops.moe_lora(*args)
    for pool in pools:
        for slot, rank in enumerate(ranks):
            pool.load(slot, rank, 2.0)
        found = ops.moe_lora(*args, pool.table, case.slots())
        assert_close(found, ref_with, BF16)
        assert_delta_close(found, base, ref_with, ref_base)
        pool.clear(0)
        assert_bit_equal(ops.moe_lora(*args, pool.table, case.slots())[::4], base[::4])
