"""Stress of the waits inside linear_lora's split launch; run as a script by test_linear_gpu.py.

A CUDA graph of 72 launches is replayed 400 times while other streams hold most of the
multiprocessors for random times. Each replay has other inputs than the one before, so what is read
too early, or is left from an earlier launch, is wrong; every output is compared bit by bit. A hang
is for the caller's time limit to find.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

import torch
from waits_stress import HOLDER_WARPS, MAX_HOLD_NS, hold_kernel

from linear_cases import GroupCase, random_case
from moegraft.backends.triton.device import device_facts
from moegraft.backends.triton.linear_lora import linear_lora_group
from moegraft.backends.triton.linear_split import SplitTile, choose_split
from moegraft.sites import Site, linear_site
from moegraft.types import TokenSlots

VARIANTS, LAYERS, REPLAYS = 3, 6, 400
TOKENS = (1, 16, 70)
SITES: tuple[tuple[Site, ...], ...] = (
    (linear_site("q", 2048, 4096), linear_site("k", 2048, 512), linear_site("v", 2048, 512)),
    (linear_site("o", 4096, 2048),),
)


@dataclass
class Stressed:
    """One launch of the graph: static input and output, and what each variant must give."""

    case: GroupCase
    slots: TokenSlots
    tile: SplitTile
    xs: torch.Tensor
    x: torch.Tensor
    outs: list[torch.Tensor]
    wanted: list[torch.Tensor]

    def run(self, pdl: bool) -> None:
        """Add the deltas to ``outs``."""
        linear_lora_group(self.x, self.case.tables, self.slots, self.outs, tile=self.tile, pdl=pdl)


def make_launches() -> list[Stressed]:
    """Return the launches; those of as many tokens share a step, and so their workspaces."""
    found = []
    for num_tokens in TOKENS:
        mix = [4, *((3 * t) % 8 - 1 for t in range(1, num_tokens))]
        cases = [
            random_case(num_tokens, torch.bfloat16, "cuda", sites=sites, token_slots=mix)
            for sites in SITES
        ]
        shared = TokenSlots(cases[0].slots.slots, cases[0].slots.live)
        for layer in range(LAYERS * 4):
            case = cases[layer % 2]
            tile = choose_split(num_tokens, case.x.shape[1], 64)
            assert tile is not None
            if layer % 4 >= 2:  # several units per program
                tile = replace(tile, shrink_programs=5, expand_programs=7)
            xs = torch.randn(VARIANTS, *case.x.shape, device="cuda").to(case.x.dtype)
            outs = [torch.empty_like(base) for base in case.bases]
            one = Stressed(case, shared, tile, xs, torch.empty_like(case.x), outs, [])
            for x in xs:
                alone = replace(one, x=x, slots=TokenSlots(shared.slots, shared.live))
                alone.outs = [base.clone() for base in case.bases]
                alone.run(pdl=False)
                one.wanted.append(torch.cat(alone.outs, 1))
            assert not torch.equal(one.wanted[0], one.wanted[1])
            found.append(one)
    return found


def main(replays: int) -> None:
    """Run the stress and print what it did, or raise."""
    chance = random.Random(1)
    launches = make_launches()
    pdl = device_facts().has_dependent_launch
    wanted = [torch.stack(one.wanted) for one in launches]
    variant = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros(len(launches), dtype=torch.int64, device="cuda")

    def step() -> None:
        for one in launches:
            one.x.copy_(one.xs.index_select(0, variant[None])[0])
            for out, base in zip(one.outs, one.case.bases, strict=True):
                out.copy_(base)
        for one in launches:
            one.run(pdl)
        for i, one in enumerate(launches):
            expected = wanted[i].index_select(0, variant[None])[0].view(torch.int16)
            wrong[i] += (torch.cat(one.outs, 1).view(torch.int16) != expected).sum()

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
        raise AssertionError(f"wrong values by launch: {where}")
    print(f"ok: {replays * len(launches)} launches, {held} times held")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPLAYS)
