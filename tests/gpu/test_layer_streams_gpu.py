"""Whole layers on several streams and in CUDA graphs: the same bits as on one stream, eagerly."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from layer_cases import CONFIG, GpuCase, mixed_case, run_mode

from moegraft.call import Mode
from moegraft.testing import assert_bit_equal, poisoned_empty
from moegraft.types import TokenSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mode", ["in_kernel", "two_stream"])
def test_a_graph_of_several_layers_serves_other_tokens_and_slots(mode: Mode) -> None:
    cases = [mixed_case(33, seed=seed) for seed in range(3)]
    cases = [replace(c, weights=cases[0].weights, adapters=cases[0].adapters) for c in cases]
    cases[1] = replace(cases[1], token_slots=(-1,) * 33)
    cases[2] = replace(cases[2], token_slots=cases[2].token_slots[::-1])
    gpu = GpuCase(cases[0])
    slots = TokenSlots.captured(gpu.slots.slots.clone())
    call = replace(gpu.call(), slots=slots, out=None)
    call = replace(
        call,
        x_TH=call.x_TH.clone(),
        topk_ids=call.topk_ids.clone(),
        topk_weights=call.topk_weights.clone(),
    )

    def layers() -> torch.Tensor:
        out = run_mode(call, mode, CONFIG)
        for _ in range(3):  # what one layer leaves behind is the next one's input
            out = run_mode(replace(call, x_TH=out.clamp(-4, 4)), mode, CONFIG)
        return out

    layers()
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):  # two graphs share the side stream and its events
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        graphs.append((graph, out))
    gc.collect()
    for i in range(30):
        case = cases[i % 3]
        call.x_TH.copy_(case.x)
        call.topk_ids.copy_(case.routing.topk_ids)
        call.topk_weights.copy_(case.routing.topk_weights)
        slots.slots.copy_(torch.tensor(case.token_slots, dtype=torch.int32))
        graph, out = graphs[i % 2]
        graph.replay()
        replayed = out.clone()
        assert_bit_equal(replayed, layers(), f"replay {i}")


def test_two_stream_keeps_its_bits_while_memory_is_reused_at_once() -> None:
    gpu = GpuCase(mixed_case(64))
    wanted = gpu.run("serial")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            # No synchronisation: scratch that a call gave back is taken and overwritten at once.
            found.append(run_mode(gpu.call(), "two_stream", CONFIG))
            with poisoned_empty():
                for _ in range(3):
                    torch.empty(128, 512, device="cuda")
    torch.cuda.synchronize()
    for out in found:
        assert_bit_equal(out, wanted)


def test_an_error_in_a_side_streams_work_leaves_the_streams_joined() -> None:
    from moegraft.streams import beside, side_stream

    def fail() -> None:
        torch.cuda._sleep(1000)
        raise RuntimeError("no")

    current = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="no"), beside(torch.device("cuda"), fail):
        pass
    side = side_stream(current)
    assert side_stream(current) is side and side.stream != current
    torch.cuda.synchronize()
    assert side.joined.query()
