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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from parallel_checks import (
    Share,
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


@dataclass(frozen=True, eq=False)
class Session:
    """What every split is measured against.

    Attributes:
        case: the whole layer and its inputs.
        one_gpu: its result of the first input set, on this GPU alone.
        expected, timer: for checks and times.
        head: what every record begins with, the figures of one GPU among it.
        out: where records go, or None.
        say: tells people.
    """

    case: DecodeCase
    one_gpu: torch.Tensor
    expected: Expected
    timer: Timer
    head: records.Record
    out: Path | None
    say: Callable[[str], None]

    def measure_split(self, name: str, share: Share) -> bool:
        """Check, time and record the layer over the ranks; returns whether its retention holds."""
        case = self.case
        base = run_of(case, share.layer(lora=False), f"{name} base", lora=False)
        lora = run_of(case, share.layer(), name, lora=True)
        assert_close(lora.call(0), self.one_gpu.float(), self.one_gpu.dtype)
        found = measure(case, base, lora, self.expected, self.timer)
        retention, one = found["base_us"] / found["lora_us"], self.head["one_gpu"]
        within = retention >= one["retention"] - ALLOWED
        by_bytes = bytes_retention(share_traffic(case, share))
        figures = {"retention": retention, "bytes_retention": by_bytes, "within_2_points": within}
        write(self.out, {**self.head, "split": name, **found, **figures})
        self.say(
            f"{name}: base {found['base_us']:.1f} us, LoRA {found['lora_us']:.1f} us, retention "
            f"{retention:.3f}, by bytes alone {by_bytes:.3f} (one GPU {one['retention']:.3f} and "
            f"{one['bytes_retention']:.3f}): {'within' if within else 'NOT within'} 2 points"
        )
        return within


def new_session(
    device: torch.device, options: argparse.Namespace, say: Callable[[str], None]
) -> Session:
    """Draw the inputs, and check and time the layer on each GPU alone."""
    shape, size = model_shape(options.model), dist.get_world_size()
    request = DecodeRequest(shape, options.tokens, options.rank, options.adapters, options.adapters)
    weights = random_layer(shape, device)
    table = random_table(shape, request.rank, request.slots, request.kind, device)
    # A rank reads its share of each set only: so many times more sets come between two uses.
    case = make_case(request, weights, table, size * l2_bytes(device))
    check_equal_inputs(case)
    timer, expected = Timer(device), Expected(case)
    say("inputs and reference")
    lora, base = LayerRun.of_layer(case, None), LayerRun.of_layer(case, "base", lora=False)
    one = measure(case, base, lora, expected, timer)
    one["retention"] = one["base_us"] / one["lora_us"]
    one["bytes_retention"] = bytes_retention(case.traffic())
    say(f"one GPU: base {one['base_us']:.1f} us, LoRA {one['lora_us']:.1f} us")
    head = {
        **records.header(SCHEMA, options.commit),
        "model": shape.name,
        "shape": [shape.num_experts, shape.hidden, shape.intermediate, shape.top_k],
        "tokens": request.tokens,
        "rank": request.rank,
        "adapters": request.live,
        "gpus": size,
        "input_sets": len(case.sets),
        "one_gpu": one,
    }
    return Session(case, lora.call(0).clone(), expected, timer, head, options.out, say)


def run_all(device: torch.device, options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Check and measure everything; returns whether every split's retention holds."""
    session, size = new_session(device, options, say), dist.get_world_size()
    experts, columns = MoeGroups.of(ep_size=size), MoeGroups.of(ep_size=1)
    alone = reduce_us(session.case, experts, session.timer)
    session.head["all_reduce_us"] = alone
    say(f"all-reduce alone: {alone:.1f} us")
    shares = {
        f"EP={size}": make_share(session.case, experts, round_robin=False),
        f"EP={size} round robin": make_share(session.case, experts, round_robin=True),
        f"TP={size}": make_share(session.case, columns, round_robin=False),
    }
    holds = [session.measure_split(name, share) for name, share in shares.items()]
    for name, share in shares.items():
        if device.type == "cuda":
            check_fixed_address(session.case, share, session.one_gpu)
            say(f"{name}: graphs of two buckets, one address")
        check_all_to_all(session.case, share, session.one_gpu)
        say(f"{name}: ranks with their own tokens")
    return all(holds)


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
