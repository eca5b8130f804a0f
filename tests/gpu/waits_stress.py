"""Stress of the waits inside the fused kernels; run as a script by test_waits_gpu.py.

A CUDA graph of 27 small layers is replayed 400 times, 10,800 layers in all, while other streams
hold most of the multiprocessors for random times. Each replay has other inputs than the one before
and starts from poisoned scratch, so whatever is read too early is wrong, and every output is
compared bit by bit. A hang is for the caller's time limit to find.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from layer_cases import CONFIG, FEW_PROGRAMS, MERGED, mixed_case, run_mode
from triton.language.extra.cuda import globaltimer

from moegraft.backends.triton.config import FusedConfig
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.fused import run_layer
from moegraft.backends.triton.workspace import Workspace, make_workspace
from moegraft.call import LayerCall

#: Inputs that take turns, and the layers of each shape and config in the graph.
VARIANTS, LAYERS = 3, 3
TOKENS = (1, 8, 40)
CONFIGS = (CONFIG, MERGED, FEW_PROGRAMS)
REPLAYS = 400
#: 32 warps are 1024 threads: two such programs fill a multiprocessor.
HOLDER_WARPS = 32
MAX_HOLD_NS = 600_000


@triton.jit
def hold_kernel(nanoseconds, max_rounds, out_ptr):
    """Hold a place on a multiprocessor for a time; never longer than ``max_rounds`` looks."""
    start = globaltimer()
    waited = start - start
    rounds = 0
    while (waited < nanoseconds) & (rounds < max_rounds):
        waited = globaltimer() - start
        rounds += 1
    tl.store(out_ptr + tl.program_id(0), rounds)


@dataclass
class Stressed:
    """One layer of the graph: its static input, what it must give for each variant."""

    call: LayerCall
    config: FusedConfig
    ws: Workspace
    xs: torch.Tensor
    wanted: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        """Where the layer writes."""
        assert self.call.out is not None
        return self.call.out


def make_layers() -> list[Stressed]:
    """Return the layers; those of one shape share their scratch."""
    pdl = device_facts().has_dependent_launch
    found = []
    for num_tokens in TOKENS:
        case = mixed_case(num_tokens, minus_ones=0.05 if num_tokens > 1 else 0.0)
        table, slots = case.table(), case.slots()
        pairs = case.routing.topk_ids.numel()
        ws = make_workspace(case.weights, pairs, CONFIG.block_m, lora=True)
        for i in range(LAYERS * len(CONFIGS)):
            config = CONFIGS[i % len(CONFIGS)]
            xs = torch.randn(VARIANTS, *case.x.shape, device="cuda").to(case.x.dtype)
            call = LayerCall(
                torch.empty_like(case.x), case.routing.topk_ids, case.routing.topk_weights,
                case.weights, table, slots, out=torch.empty_like(case.x),
            )  # fmt: skip
            wanted = torch.stack(
                [run_mode(replace(call, x_TH=x, out=None), "fused_serial", config) for x in xs]
            )
            assert wanted.isfinite().all() and not torch.equal(wanted[0], wanted[1])
            found.append(Stressed(call, replace(config, pdl=pdl), ws, xs, wanted))
    random.Random(0).shuffle(found)
    return found


def poison(layers: list[Stressed]) -> None:
    """Fill with NaN what the layers write, and the counters with other numbers than they need."""
    scratch = {id(layer.ws): layer.ws for layer in layers}.values()
    for ws in scratch:
        for buffer in (ws.h, ws.y, ws.delta_gate_up, ws.delta_down):
            assert buffer is not None
            buffer.fill_(torch.nan)
        ws.states.fill_(1 << 20)
        ws.h_counter.fill_(1 << 20)
    for layer in layers:
        layer.out.fill_(torch.nan)


def main(replays: int) -> None:
    """Run the stress and print what it did, or raise."""
    chance = random.Random(1)
    layers = make_layers()
    variant = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros(len(layers), dtype=torch.int64, device="cuda")

    def step() -> None:
        poison(layers)
        for layer in layers:
            layer.call.x_TH.copy_(layer.xs.index_select(0, variant[None])[0])
        for layer in layers:
            run_layer(layer.call, layer.config, layer.ws)
        for i, layer in enumerate(layers):
            wanted = layer.wanted.index_select(0, variant[None])[0]
            same = layer.out.view(torch.int16) == wanted.view(torch.int16)
            wrong[i] += (~same).sum()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    num_sms = device_facts().num_sms
    holders = torch.zeros(4 * num_sms, dtype=torch.int32, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    held = 0
    for replay in range(replays):
        variant.fill_(replay % VARIANTS)
        for stream in streams:
            if chance.random() < 0.4:
                # Nearly all places, half of them, or a few: for a random time.
                programs = chance.choice((2 * num_sms - 4, 2 * num_sms - 16, num_sms, 7))
                time = chance.randrange(1_000, MAX_HOLD_NS)
                with torch.cuda.stream(stream):
                    hold_kernel[(programs,)](time, 1 << 20, holders, num_warps=HOLDER_WARPS)
                held += 1
        graph.replay()
        if replay % 50 == 49:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    if wrong.any():
        where = {i: int(n) for i, n in enumerate(wrong.tolist()) if n}
        kinds = [
            (len(layer.out), CONFIGS.index(replace(layer.config, pdl=False))) for layer in layers
        ]
        raise AssertionError(
            f"wrong values by layer: {where}; tokens and config of each layer: {kinds}"
        )
    print(f"ok: {replays * len(layers)} layers, {held} times held")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPLAYS)
