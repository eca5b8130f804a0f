"""Experts over two GPUs: equal to one GPU in CUDA graphs, and how fast; run by hand:

NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 tests/gpu/parallel_gpu.py --out FILE

Every rank checks and times the whole layer on its own GPU first, then its share of it with the
other: experts over ranks (a range, and in turn), and each expert over ranks. A rank that finds
something wrong ends at once, which ends the other. On two CPU processes (``--cpu``) the same runs
small, without graphs, to try the script itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from parallel_checks import (
    bytes_retention,
    check_all_to_all,
    check_equal_inputs,
    check_fixed_address,
    make_share,
    share_traffic,
    slowest,
)
from two_gpus import joined

from moegraft.bench import records
from moegraft.bench.cases import DecodeCase, Inputs, make_case, random_layer, random_table
from moegraft.bench.harness import Timer, l2_bytes
from moegraft.bench.layer_runs import CheckedRun, Expected, LayerRun
from moegraft.bench.options import DecodeRequest
from moegraft.bench.shapes import model_shape
from moegraft.parallel import AllReduceMoe, MoeGroups
from moegraft.testing import assert_bit_equal, assert_close
from moegraft.types import TokenSlots

SCHEMA = "moegraft.parallel/1"
#: Points of retention that several GPUs may lose against one.
ALLOWED = 0.02


def run_of(case: DecodeCase, layer: AllReduceMoe, name: str, lora: bool) -> LayerRun:
    """The layer over the input sets of a case."""

    def function(inputs: Inputs, slots: TokenSlots | None) -> torch.Tensor:
        return layer(inputs.x, inputs.topk_ids, inputs.topk_weights, slots)

    plan = layer.partial.layer.plan(*case.sets[0].topk_ids.shape).explain()
    return LayerRun(case, function, name, plan, lora)


def measure(
    case: DecodeCase, base: LayerRun, lora: LayerRun, expected: Expected, timer: Timer
) -> dict[str, Any]:
    """Check and time base and adapters, captured; raises when a result is wrong."""
    plain = base.call(0).clone()
    expected.check_base(plain)
    replay = timer.capture(base)
    replay()
    assert_bit_equal(base.outs[0], plain, "the base's graph and the eager call")
    base_us = timer.measure(replay, len(case.sets)).median * 1e6
    run = CheckedRun(lora, expected, timer)
    found = run.measure(cold=False)
    return {
        "base_us": slowest(base_us),
        "lora_us": slowest(found["us"]),
        "idle_us": slowest(found["idle_us"]),
        "checked": found["checked"],
        "plan": found["plan"],
    }


def reduce_us(case: DecodeCase, groups: MoeGroups, timer: Timer) -> float:
    """Microseconds of the all-reduce alone, in a graph."""
    out = torch.zeros_like(case.sets[0].x)
    turns = 8

    def run() -> None:
        for _ in range(turns):
            dist.all_reduce(out, group=groups.whole)

    return slowest(timer.measure(timer.capture(run), turns).median * 1e6)


def run_all(device: torch.device, options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Check and measure everything; rank 0 writes records. Returns whether retention holds."""
    size = dist.get_world_size()
    shape = model_shape(options.model)
    request = DecodeRequest(shape, options.tokens, options.rank, options.adapters, options.adapters)
    weights = random_layer(shape, device)
    table = random_table(shape, request.rank, request.slots, request.kind, device)
    # A rank reads its share of each set only: so many times more sets come between two uses.
    case = make_case(request, weights, table, size * l2_bytes(device))
    check_equal_inputs(case)
    timer, expected = Timer(device), Expected(case)
    say("inputs and reference")
    lora, base = LayerRun.of_layer(case, None), LayerRun.of_layer(case, "base", lora=False)
    single = measure(case, base, lora, expected, timer)
    one_gpu = lora.call(0).clone()
    say(f"one GPU: base {single['base_us']:.1f} us, LoRA {single['lora_us']:.1f} us")
    one = single["base_us"] / single["lora_us"]
    head = {
        **records.header(SCHEMA, options.commit),
        "model": shape.name,
        "shape": [shape.num_experts, shape.hidden, shape.intermediate, shape.top_k],
        "tokens": request.tokens,
        "rank": request.rank,
        "adapters": request.live,
        "gpus": size,
        "input_sets": len(case.sets),
    }
    bytes_one = bytes_retention(case.traffic())
    write(
        options.out,
        {**head, "split": "one GPU", **single, "retention": one, "bytes_retention": bytes_one},
    )
    experts, columns = MoeGroups.of(ep_size=size), MoeGroups.of(ep_size=1)
    alone = reduce_us(case, experts, timer)
    say(f"all-reduce alone: {alone:.1f} us")
    splits: Mapping[str, tuple[MoeGroups, bool]] = {
        f"EP={size}": (experts, False),
        f"EP={size} round robin": (experts, True),
        f"TP={size}": (columns, False),
    }
    holds = True
    for name, (groups, round_robin) in splits.items():
        share = make_share(case, groups, round_robin)
        found = measure(
            case,
            run_of(case, share.layer(lora=False), f"{name} base", lora=False),
            run_of(case, share.layer(), name, lora=True),
            expected,
            timer,
        )
        first = case.sets[0]
        slots = TokenSlots(case.slots, case.live)
        eager = share.layer()(first.x, first.topk_ids, first.topk_weights, slots)
        assert_close(eager, one_gpu.float(), eager.dtype)
        if device.type == "cuda":
            check_fixed_address(case, share, one_gpu)
        if groups is experts:
            check_all_to_all(case, share, one_gpu)
        retention = found["base_us"] / found["lora_us"]
        within = retention >= one - ALLOWED
        by_bytes = bytes_retention(share_traffic(case, share))
        holds = holds and within
        write(
            options.out,
            {
                **head,
                "split": name,
                **found,
                "all_reduce_us": alone,
                "retention": retention,
                "bytes_retention": by_bytes,
                "one_gpu_retention": one,
                "within_2_points": within,
            },
        )
        say(
            f"{name}: base {found['base_us']:.1f} us, LoRA {found['lora_us']:.1f} us, retention "
            f"{retention:.3f} (one GPU {one:.3f}; by bytes alone {by_bytes:.3f} and "
            f"{bytes_one:.3f}): {'within' if within else 'NOT within'} 2 points"
        )
    return holds


def write(path: Path | None, record: records.Record) -> None:
    """Append a record, on rank 0."""
    if path is not None and dist.get_rank() == 0:
        records.append(path, record)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file that JSON lines are added to")
    parser.add_argument("--model", default="q30", help="a model's name, or E,H,I,K")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--commit", help="written to the records; default: asked from git")
    parser.add_argument("--cpu", action="store_true", help="try the script, with gloo")
    options = parser.parse_args()
    start = time.monotonic()

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[{time.monotonic() - start:5.1f} s] {text}", flush=True)

    with joined(options.cpu) as device:
        holds = run_all(device, options, say)
        say("all results are right" + ("" if holds else "; RETENTION IS NOT WITHIN 2 POINTS"))


if __name__ == "__main__":
    main()
