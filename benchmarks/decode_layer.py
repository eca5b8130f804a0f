"""Time the decode kernels of one MoE-LoRA layer on a GPU, beside their limit and torch's own.

    python benchmarks/decode_layer.py --commit $(git rev-parse --short HEAD) --out out.jsonl

Whole layer from topk ids to the summed output, CUDA-graph replay, median; several input sets in one
graph, so that the touched weights come from memory, not from the L2. *Limit*: bytes of the experts
and (adapter, expert) factors that are touched, each once, over the best pure read of this run.
``grouped_mm``: both products of ``torch.nn.functional.grouped_mm``, without sort and finalize.
Every row is written only after its configuration was checked against the fp32 reference and, bit by
bit, against the serial launches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from moegraft.backends.triton.config import FusedConfig, GemmConfig
from moegraft.backends.triton.launch import Workspace, make_workspace, run_layer
from moegraft.factor_table import SiteTable, site_table
from moegraft.reference import moe_lora_reference
from moegraft.sites import expert_site
from moegraft.testing import random_factors, random_weights
from moegraft.testing.cases import table_on
from moegraft.types import ExpertWeights, SiteFactors

#: name -> E, H, I, K
MODELS = {"q30": (128, 2048, 768, 8), "q35": (256, 2048, 512, 8)}
GEMMS = (GemmConfig(64, 128, 4, 3), GemmConfig(128, 64, 4, 4))
#: The best tiles so far, with shrinks that differ in rank rows, K step, warps and stages.
CONFIGS = tuple(
    FusedConfig(16, *GEMMS, shrink, pdl=True)
    for shrink in (
        GemmConfig(16, 128, 4, 4),
        GemmConfig(32, 128, 4, 4),
        GemmConfig(16, 128, 1, 4),
        GemmConfig(16, 64, 2, 8),
    )
)


@triton.jit
def _read(p, out, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.int32)
    for i in range(TURNS):
        acc ^= tl.load(p + (pid * TURNS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + pid, tl.sum(acc, 0))


def read_bandwidth() -> float:
    """Return bytes per second of the best pure read over 4 GiB."""
    data = torch.randint(0, 100, (1 << 30,), dtype=torch.int32, device="cuda")
    best = 0.0
    for block, turns, warps in ((4096, 16, 8), (4096, 8, 8), (2048, 16, 4), (8192, 8, 8)):
        programs = data.numel() // (block * turns)
        out = torch.empty(programs, dtype=torch.int32, device="cuda")

        def run(block: int = block, turns: int = turns, warps: int = warps) -> None:
            _read[(programs,)](data, out, BLOCK=block, TURNS=turns, num_warps=warps)  # noqa: B023

        best = max(best, data.numel() * 4 / graph_seconds(run))
    return best


def graph_seconds(run: Callable[[], None], repeats: int = 20) -> float:
    """Return the median seconds of one replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return sorted(times[3:])[repeats // 2]


@dataclass(frozen=True)
class Case:
    """Inputs of one row: several sets of activations and ids, one set of weights and slots."""

    weights: ExpertWeights
    table: SiteTable
    factors: list[SiteFactors | None]
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    topk_weights: torch.Tensor
    slots: torch.Tensor
    rank: int

    def touched_bytes(self, lora: bool) -> float:
        """Bytes that must move per layer call, averaged over the input sets."""
        w = self.weights
        total = 0.0
        for ids in self.ids:
            total += ids.unique().numel() * 3 * w.hidden * w.intermediate * 2
            if lora:
                pairs = (ids.long() * 1024 + self.slots.long()[:, None])[self.slots >= 0].unique()
                total += pairs.numel() * self.rank * 3 * (w.hidden + w.intermediate) * 2
        return total / len(self.ids)

    def runner(
        self, config: FusedConfig, spaces: list[Workspace], slots: torch.Tensor | None
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Return a function that runs every input set once, and where its outputs are."""
        outs = [torch.empty_like(x) for x in self.xs]

        def run() -> None:
            for x, ids, ws, out in zip(self.xs, self.ids, spaces, outs, strict=True):
                run_layer(
                    x, ids, self.topk_weights, self.weights, self.table, slots, ws, config, out
                )

        return run, outs


def make_case(
    weights: ExpertWeights, table: SiteTable, factors: list[SiteFactors | None], tokens: int,
    top_k: int, live: int, rank: int,
) -> Case:  # fmt: skip
    """Draw inputs; ``live`` adapters take the tokens in turn."""
    sets = {1: 24, 4: 12, 16: 4}.get(tokens, 3)
    generator = torch.Generator().manual_seed(tokens)
    experts = weights.num_experts
    ids = [
        torch.rand(tokens, experts, generator=generator).topk(top_k, 1)[1].int().cuda()
        for _ in range(sets)
    ]
    xs = [
        torch.randn(tokens, weights.hidden, generator=generator).to("cuda", torch.bfloat16)
        for _ in range(sets)
    ]
    slots = (torch.arange(tokens, dtype=torch.int32) % live).cuda()
    topk_weights = torch.softmax(torch.randn(tokens, top_k, generator=generator), 1).cuda()
    return Case(weights, table, factors, xs, ids, topk_weights, slots, rank)


def poison(spaces: list[Workspace]) -> None:
    """Fill every buffer with values that would show."""
    for ws in spaces:
        for floats in (ws.h, ws.y, ws.ranks_gate_up, ws.ranks_down):
            floats.fill_(torch.nan)
        for ints in (ws.desc32, ws.desc64, ws.block_info, ws.row_pair, ws.pair_row, ws.pair_head):
            ints.fill_(1 << 20)


def check(case: Case, config: FusedConfig, spaces: list[Workspace]) -> dict[str, Any]:
    """Check a configuration; AssertionError when it is wrong."""
    serial = replace(config, pdl=False)
    found: dict[str, torch.Tensor] = {}
    for name, cfg, slots in (
        ("base", config, None),
        ("lora", config, case.slots),
        ("serial", serial, case.slots),
        ("all base", config, torch.full_like(case.slots, -1)),
    ):
        run, outs = case.runner(cfg, spaces, slots)
        poison(spaces)
        run()
        found[name] = outs[0]
    assert torch.equal(found["lora"], found["serial"]), "dependent launches differ from serial"
    assert torch.equal(found["base"], found["all base"]), "rows without adapter differ from base"
    rows = slice(0, 16)
    args = (case.xs[0][rows], case.ids[0][rows], case.topk_weights[rows], case.weights)
    with_lora = moe_lora_reference(*args, case.factors, case.slots[rows].tolist())
    base = moe_lora_reference(*args)

    def error(value: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((value - wanted).norm() / wanted.norm())

    output = error(found["lora"][rows].float(), with_lora)
    delta = error(found["lora"][rows].float() - found["base"][rows].float(), with_lora - base)
    assert output <= 1e-2 and delta <= 2e-2, f"output {output:.1e}, delta {delta:.1e}"
    return {"output_error": output, "delta_error": delta, "bits": "equal to serial and to base"}


def grouped_mm_seconds(case: Case) -> float:
    """Time torch's grouped products for the same pairs, without sort, activation and finalize."""
    w = case.weights
    pairs = case.ids[0].numel()
    ends = [
        torch.bincount(ids.view(-1), minlength=w.num_experts).cumsum(0).int() for ids in case.ids
    ]
    x = torch.randn(pairs, w.hidden, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(pairs, w.intermediate, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for offs in ends:
            F.grouped_mm(x, w.gate_up_oi.transpose(1, 2), offs=offs)
            F.grouped_mm(h, w.down_oi.transpose(1, 2), offs=offs)

    return graph_seconds(run) / len(ends)


def measure(case: Case, bandwidth: float, max_rank: int) -> dict[str, Any]:
    """Check and time all configurations of a case; return the best one's figures."""
    best: dict[str, Any] = {}
    for config in CONFIGS:
        spaces = [
            make_workspace(case.weights, ids.numel(), config.block_m, max_rank, torch.float32)
            for ids in case.ids
        ]
        checked = check(case, config, spaces)
        us = {}
        for name, slots in (
            ("base", None),
            ("lora", case.slots),
            ("lora_all_base", torch.full_like(case.slots, -1)),
        ):
            run, _ = case.runner(config, spaces, slots)
            us[name] = graph_seconds(run) / len(case.ids) * 1e6
        if not best or us["lora"] < best["us"]["lora"]:
            best = {"us": us, "config": str(config), "checked": checked}
    best["us"]["grouped_mm"] = grouped_mm_seconds(case) * 1e6
    limit = {n: case.touched_bytes(n == "lora") / bandwidth * 1e6 for n in ("base", "lora")}
    best["limit_us"] = limit
    best["share_of_limit"] = {n: limit[n] / best["us"][n] for n in limit}
    best["retention"] = best["us"]["base"] / best["us"]["lora"]
    return best


def main() -> None:
    """Run all cases and append a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 32, 64, 128, 256])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--live", nargs="+", type=int, default=[8])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    print(f"read {bandwidth / 1e9:.0f} GB/s")
    facts = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": args.commit,
        "read_gb_s": round(bandwidth / 1e9),
    }
    with args.out.open("a") as file:
        for model in args.models:
            experts, hidden, inter, top_k = MODELS[model]
            weights = random_weights(experts, hidden, inter, dtype=torch.bfloat16, device="cuda")
            site = expert_site("experts", experts, hidden, inter)
            adapters = [random_factors(site, args.rank, "separate", seed=s) for s in range(8)]
            table = table_on(site_table(site, adapters, torch.bfloat16), "cuda")
            factors = [table.factors(slot) for slot in range(8)]
            for live in args.live:
                for tokens in args.tokens:
                    case = make_case(weights, table, factors, tokens, top_k, live, args.rank)
                    row = measure(case, bandwidth, args.rank)
                    us, share = row["us"], row["share_of_limit"]
                    print(
                        f"{model} T={tokens} live={live} rank={args.rank}: base {us['base']:.1f} us"
                        f" ({share['base']:.2f}), LoRA {us['lora']:.1f} ({share['lora']:.2f}), all"
                        f" base rows {us['lora_all_base']:.1f}, grouped_mm {us['grouped_mm']:.0f}",
                        flush=True,
                    )
                    head = {"model": model, "tokens": tokens, "rank": args.rank, "live": live}
                    file.write(json.dumps({**facts, **head, "slots": 8, **row}) + "\n")


if __name__ == "__main__":
    main()
