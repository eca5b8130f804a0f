"""The ops on a CUDA device: bf16, events by object and by raw handle, graphs, the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moegraft import ops
from moegraft.adapters.foreign import packed_pool, stacked_pool
from moegraft.backends.triton.fused import MAX_PAIRS
from moegraft.errors import MoegraftError
from moegraft.testing import (
    LayerCase,
    assert_bit_equal,
    assert_close,
    assert_delta_close,
    poisoned_empty,
)
from moegraft.types import Activation, LoraFactor, SiteFactors, TokenSlots, WeightLayout
from ops_cases import HostDelta, ops_case, routed, with_all_deltas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
SIZES = {"num_experts": 8, "hidden": 256, "intermediate": 128}
#: Cycles that a stream sleeps: some milliseconds, long beside any launch of these tests.
SLEEP = 20_000_000


def gpu_case(num_tokens: int = 24, **options: Any) -> LayerCase:
    """A case in bf16 on the GPU."""
    return ops_case(num_tokens, device="cuda", **{"dtype": BF16, **SIZES, **options})


def run_moe_lora(case: LayerCase, slots: TokenSlots | None, **options: Any) -> torch.Tensor:
    """Run ``moe_lora`` on a case."""
    return ops.moe_lora(
        case.x,
        case.routing.topk_ids,
        case.routing.topk_weights,
        case.weights,
        case.table(),
        slots,
        expert_offset=case.expert_offset,
        routed_scaling_factor=case.scale,
        **options,
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_op_with_a_hosts_deltas_equals_the_reference(
    num_tokens: int, dtype: torch.dtype
) -> None:
    case = gpu_case(num_tokens, scale=1.5, expert_offset=2, dtype=dtype)
    with poisoned_empty():
        found = with_all_deltas(case)
        whole, base = run_moe_lora(case, case.slots()), run_moe_lora(case, None)
    assert found.shape == case.x.shape
    if num_tokens:
        ref_with, ref_base = case.reference(), case.reference(base=True)
        assert_close(found, ref_with, dtype)
        assert_close(whole, ref_with, dtype)
        assert_delta_close(whole, base, ref_with, ref_base)


@pytest.mark.parametrize(
    ("layout", "activation"),
    [
        (WeightLayout("up_first"), Activation("gelu_tanh")),
        (WeightLayout(), Activation("silu", limit=0.7, alpha=1.702, up_shift=1.0)),
        (WeightLayout("no_gate"), Activation("relu2")),
    ],
    ids=["up first", "clamped", "no gate"],
)
def test_layouts_and_activations(layout: WeightLayout, activation: Activation) -> None:
    case = gpu_case(layout=layout, activation=activation)
    assert_close(with_all_deltas(case), case.reference(), BF16)
    event = torch.cuda.Event()
    event.record()
    assert_close(with_all_deltas(case, lora_ready_event=event), case.reference(), BF16)


def test_rows_then_finalize_equal_the_call_that_sums() -> None:
    case = gpu_case(scale=1.25)
    delta = HostDelta.of(case).gate_up.to(BF16)
    ids = case.routing.topk_ids
    h = torch.full((*ids.shape, 128), torch.nan, dtype=BF16, device="cuda")
    with poisoned_empty():
        whole = routed(case, gate_up_lora_delta=delta, activation_lora_input=h)
        rows = routed(case, gate_up_lora_delta=delta, do_finalize=False)
        summed = ops.finalize_moe_lora(*rows, routed_scaling_factor=1.25)
    assert_close(summed, whole.double(), BF16)
    assert torch.equal(rows.expanded_idx_to_permuted_idx < 0, ids.view(-1) < 0)
    assert bool((h[ids < 0] == 0).all()) and bool(h.isfinite().all())
    packed = ops.pack_topk(ids, case.routing.topk_weights)
    args = (packed, case.x, case.weights.gate_up, case.weights.down)
    again = ops.routed_moe_lora(*args, gate_up_lora_delta=delta, routed_scaling_factor=1.25)
    assert_bit_equal(again, whole)


def test_a_weighted_delta_of_down_is_added_after_the_sum() -> None:
    case = gpu_case(scale=2.0)
    delta = HostDelta.of(case)
    h = torch.empty(*case.routing.topk_ids.shape, 128, dtype=BF16, device="cuda")
    out = routed(case, gate_up_lora_delta=delta.gate_up, activation_lora_input=h)
    ops.add_down_delta(
        out,
        delta.down(h, weighted=True),
        case.routing.topk_ids,
        local_num_experts=8,
        routed_scaling_factor=2.0,
    )
    assert_close(out, case.reference(), BF16)


def test_dependent_launch_changes_no_bit() -> None:
    case = gpu_case(64)
    delta = HostDelta.of(case).gate_up
    wanted = routed(case, gate_up_lora_delta=delta, enable_pdl=False)
    for _ in range(50):
        assert_bit_equal(routed(case, gate_up_lora_delta=delta), wanted)


@pytest.mark.parametrize("raw", [False, True], ids=["objects", "handles"])
@pytest.mark.parametrize("finalize", [True, False])
def test_the_delta_is_read_behind_its_event_and_h_is_there_behind_the_other(
    finalize: bool, raw: bool
) -> None:
    case = gpu_case(scale=1.0)
    ready_made = HostDelta.of(case).gate_up.to(BF16)
    delta = torch.full_like(ready_made, torch.nan)
    shape = (*case.routing.topk_ids.shape, 128)
    wanted_h = torch.empty(shape, dtype=BF16, device="cuda")
    event = torch.cuda.Event()
    event.record()
    kept = {"do_finalize": finalize}
    wanted = routed(
        case,
        gate_up_lora_delta=ready_made,
        activation_lora_input=wanted_h,
        lora_ready_event=event,
        **kept,
    )
    h, seen = (torch.full(shape, torch.nan, dtype=BF16, device="cuda") for _ in range(2))
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    if raw:
        done.record()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        delta.copy_(ready_made)
        ready.record()
    found = routed(
        case,
        gate_up_lora_delta=delta,
        activation_lora_input=h,
        lora_ready_event=ready.cuda_event if raw else ready,
        gemm2_done_event=done.cuda_event if raw else done,
        **kept,
    )
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        other.wait_event(done)
        seen.copy_(h)
    torch.cuda.synchronize()
    local = case.routing.topk_ids.view(-1) >= 0
    if finalize:
        assert_bit_equal(found, wanted)
    else:
        assert_bit_equal(found.rows[local], wanted.rows[local])
    assert_bit_equal(seen, wanted_h)
    fused = torch.empty_like(wanted_h)
    routed(case, gate_up_lora_delta=ready_made, activation_lora_input=fused)
    assert_close(wanted_h, fused.double(), BF16)


def test_events_that_mean_nothing_are_refused() -> None:
    case = gpu_case(2)
    with pytest.raises(MoegraftError, match="lora_ready_event was never recorded"):
        routed(case, lora_ready_event=torch.cuda.Event())


def test_a_graph_with_a_side_stream_serves_other_inputs_at_each_replay() -> None:
    case = gpu_case(16)
    ids, weights = case.routing.topk_ids.clone(), case.routing.topk_weights.clone()
    x, factor = case.x.clone(), torch.randn(256, 256, dtype=BF16, device="cuda") / 16
    delta = torch.empty(*ids.shape, 256, dtype=BF16, device="cuda")
    out = torch.empty_like(x)
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def fill() -> None:
        delta.copy_((x @ factor)[:, None])

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fill()
            ready.record()
        ops.routed_moe_lora(
            ids,
            x,
            case.weights.gate_up,
            case.weights.down,
            topk_weights=weights,
            gate_up_lora_delta=delta,
            output=out,
            lora_ready_event=ready,
            gemm2_done_event=done,
        )

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        ids.copy_(ids.roll(1, 0))
        delta.fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        found = out.clone()
        step()
        torch.cuda.synchronize()
        assert_bit_equal(found, out)


def test_more_pairs_than_one_round_of_launches_takes() -> None:
    case = gpu_case(7)
    repeats = MAX_PAIRS // 7 // 2 + 10
    ids = case.routing.topk_ids.repeat(repeats, 1)
    weights = case.routing.topk_weights.repeat(repeats, 1)
    delta = HostDelta.of(case).gate_up.repeat(repeats, 1, 1)
    h = torch.empty(*ids.shape, 128, dtype=BF16, device="cuda")
    event = torch.cuda.Event()
    event.record()
    for options in ({}, {"lora_ready_event": event, "gemm2_done_event": torch.cuda.Event()}):
        found = ops.routed_moe_lora(
            ids,
            case.x.repeat(repeats, 1),
            case.weights.gate_up,
            case.weights.down,
            topk_weights=weights,
            gate_up_lora_delta=delta,
            activation_lora_input=h,
            **options,
        )
        assert ids.numel() > MAX_PAIRS
        wanted = routed(case, gate_up_lora_delta=delta[:7].contiguous())
        assert_close(found, wanted.double().repeat(repeats, 1), BF16)
        assert bool((h[ids < 0] == 0).all())
        rows = ops.routed_moe_lora(
            ids,
            case.x.repeat(repeats, 1),
            case.weights.gate_up,
            case.weights.down,
            topk_weights=weights,
            gate_up_lora_delta=delta,
            do_finalize=False,
            **options,
        )
        assert_close(ops.finalize_moe_lora(*rows), found.double(), BF16)


def test_opcheck_finds_nothing_on_the_gpu() -> None:
    case = gpu_case(5)
    w, ids, table, slots = case.weights, case.routing.topk_ids, case.table(), case.slots()
    delta = HostDelta.of(case).gate_up.nan_to_num().flatten(0, 1)
    h = torch.zeros(ids.numel(), 128, dtype=BF16, device="cuda")
    rows = torch.zeros(ids.numel(), 256, dtype=BF16, device="cuda")
    index = torch.zeros(ids.numel(), dtype=torch.int32, device="cuda")
    args = (
        case.x, ids, case.routing.topk_weights, w.gate_up, w.down, delta, "gate_first", "silu",
        None, 1.0, 0.0, 0,
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
        case.x, ids, case.routing.topk_weights, w.gate_up, w.down, None, None, table.arena.data,
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
