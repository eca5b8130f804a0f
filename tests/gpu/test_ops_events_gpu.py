"""CUDA events of the routed op, by object and by raw handle, and graphs with a side stream."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moegraft import ops
from moegraft.errors import MoegraftError
from moegraft.testing import assert_bit_equal, assert_close
from ops_cases import HostDelta, gpu_case, routed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
#: Cycles that a stream sleeps: some milliseconds, long beside any launch of these tests.
SLEEP = 20_000_000


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
