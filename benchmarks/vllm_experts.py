"""The vLLM plugin's experts class beside the library's own layer, on the same factors and rows.

The class reads vLLM's slot tensors through vLLM's context and metadata objects, the layer a bank.
Both run in CUDA graphs over a few layers in a row, whose weights are larger than the L2, in turns;
their results are compared first. Needs vLLM in the environment. Without a GPU it runs tiny sizes on
the CPU, as a test of itself.

    python benchmarks/vllm_experts.py --tokens 1,16,64,256 --adapters 1,8
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.utils import LoRAMapping
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.foreign import stacked_pool
from moegraft.bench import records
from moegraft.bench.harness import Timer
from moegraft.bench.report import text_table
from moegraft.hosts.slot_tensors import rank_major
from moegraft.hosts.vllm.experts import MoegraftExperts
from moegraft.hosts.vllm.formulas import formula
from moegraft.hosts.vllm.punica import PunicaWrapperCPU, PunicaWrapperGPU
from moegraft.ops import moe_lora
from moegraft.packing import pack_adapter
from moegraft.sites import expert_site
from moegraft.types import ExpertWeights, LoraFactor, SiteFactors, TokenSlots

SCHEMA = "moegraft.vllm-experts/1"
GPU = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if GPU else "cpu"), torch.bfloat16 if GPU else torch.float32
#: Qwen3-30B-A3B: experts, hidden, intermediate, experts per token.
E, H, WIDTH, K = (128, 2048, 768, 8) if GPU else (8, 64, 32, 2)
TOLERANCE = 1e-2 if GPU else 1e-5


class Layer:
    """One layer: weights, the slot tensors with adapters in all slots, and the same in a bank."""

    def __init__(self, options: argparse.Namespace, punica: Any, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        slots, rank = options.slots, options.rank

        def draw(*sizes: int, scale: float) -> torch.Tensor:
            values = torch.randn(sizes, device=DEVICE, generator=generator, dtype=DTYPE)
            return values.mul_(scale)

        self.w13, self.w2 = (
            draw(E, 2 * WIDTH, H, scale=H**-0.5),
            draw(E, H, WIDTH, scale=WIDTH**-0.5),
        )
        a = [draw(slots, E, rank, n, scale=n**-0.5) for n in (H, H, WIDTH)]
        b = []
        for num_out in (WIDTH, WIDTH, H):
            stored = rank_major(torch.empty(slots, E, num_out, rank, device=DEVICE, dtype=DTYPE))
            b.append(stored.copy_(draw(slots, E, num_out, rank, scale=rank**-0.5)))
        config = FusedMoEConfig(
            num_experts=E, experts_per_token=K, hidden_dim=H, intermediate_size=WIDTH,
            num_local_experts=E, num_logical_experts=E, activation=MoEActivation.SILU,
            device=DEVICE, routing_method=RoutingMethodType.Renormalize, in_dtype=DTYPE,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), is_lora_enabled=True,
        )  # fmt: skip
        stock = TritonExperts(config, FusedMoEQuantConfig.make())
        found = formula("silu", stock)
        assert found is not None
        site = expert_site(f"layer{seed}", E, H, WIDTH, found.layout)
        pool = stacked_pool(site, a[:2], b[:2], a[2], b[2])
        assert pool.copied_bytes == 0
        bank = AdapterBank(
            [site], num_slots=slots, max_rank=rank, dtype=DTYPE, device=DEVICE,
            arena_bytes=sum(t.numel() * t.element_size() for t in (*a, *b)) + (1 << 20),
        )  # fmt: skip
        for slot in range(slots):
            pool.load(slot, rank)
            factors = {
                name: LoraFactor(a[i][slot].cpu(), b[i][slot].cpu(), 1.0)
                for i, name in enumerate(("gate", "up", "down"))
            }
            packed = pack_adapter({site.name: SiteFactors(factors)}, bank.layout, DTYPE)
            bank.write(slot, f"adapter {slot}", packed)
        self.table = bank.site_table(site.name)
        self.weights = ExpertWeights(self.w13, self.w2)
        self.experts = MoegraftExperts(stock, found, pool.table, None)
        context = MoELoRAContext(
            w13_lora_a_stacked=tuple(a[:2]), w13_lora_b_stacked=tuple(b[:2]),
            w2_lora_a_stacked=(a[2],), w2_lora_b_stacked=(b[2],),
            adapter_enabled=torch.ones(slots + 1, dtype=torch.int32, device=DEVICE),
            max_loras=slots, top_k=K, w13_num_slices=2, fully_sharded=False, tp_rank=0,
            tp_size=1, local_num_experts=E, punica_wrapper=punica, use_tuned_config=False,
        )  # fmt: skip
        self.experts.set_lora_context(context)


class Batch:
    """Rows, routing and outputs that all layers share."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.x = torch.randn(num_tokens, H, device=DEVICE, generator=generator).to(DTYPE)
        scores = torch.rand(num_tokens, E, device=DEVICE, generator=generator)
        weights, ids = scores.softmax(-1).topk(K)
        self.ids, self.weights = ids.to(torch.int32), weights
        self.out = torch.empty_like(self.x)

    def plugin(self, layer: Layer) -> torch.Tensor:
        """Call the class as vLLM's kernel object does."""
        scratch = self.x.new_empty(0)
        layer.experts.apply(
            self.out, self.x, layer.w13, layer.w2, self.weights, self.ids, MoEActivation.SILU, E,
            None, None, None, scratch, scratch, None, False,
        )  # fmt: skip
        return self.out

    def library(self, layer: Layer, slots: TokenSlots) -> torch.Tensor:
        """Call the library's layer."""
        return moe_lora(
            self.x, self.ids, self.weights, layer.weights, layer.table, slots, out=self.out
        )


def measure(
    layers: list[Layer], batch: Batch, slots: torch.Tensor, timer: Timer
) -> dict[str, float]:
    """Return microseconds per layer of both, and how far their results differ."""
    tokens = TokenSlots.captured(slots) if GPU else TokenSlots.of(slots)
    error = 0.0
    for layer in layers:
        ours, wanted = batch.plugin(layer).clone(), batch.library(layer, tokens).clone()
        error = max(error, float((ours - wanted).float().norm() / wanted.float().norm()))
    runs: dict[str, Callable[[], None]] = {
        "plugin": lambda: [batch.plugin(layer) for layer in layers] and None,
        "library": lambda: [batch.library(layer, tokens) for layer in layers] and None,
    }
    replays = {name: timer.capture(run) for name, run in runs.items()}
    times = timer.measure_in_turns(replays, parts=len(layers))
    return {"error": error, **{f"{name}_us": t.median * 1e6 for name, t in times.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when the results differ."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=numbers, default="1,16,64,256" if GPU else "1,9")
    parser.add_argument("--adapters", type=numbers, default="1,8" if GPU else "1,3")
    parser.add_argument("--rank", type=int, default=16 if GPU else 8)
    parser.add_argument("--slots", type=int, default=8 if GPU else 3)
    parser.add_argument("--layers", type=int, default=4 if GPU else 2)
    parser.add_argument("--repeats", type=int, default=50 if GPU else 2)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="add records to this file")
    options = parser.parse_args(arguments)
    lora = LoRAConfig(max_lora_rank=options.rank, max_loras=options.slots, lora_dtype=DTYPE)
    punica = (PunicaWrapperGPU if GPU else PunicaWrapperCPU)(
        8192, max_batches=256, device=DEVICE, lora_config=lora
    )
    layers = [Layer(options, punica, seed) for seed in range(options.layers)]
    timer, head = Timer(DEVICE, options.repeats), records.header(SCHEMA, options.commit)
    numbers_of_adapters = list(range(1, options.slots + 1))
    rows, failed = [], False
    for num_tokens, adapters in itertools.product(options.tokens, options.adapters):
        if adapters > num_tokens:
            continue
        names = tuple(1 + t % adapters for t in range(num_tokens))
        mapping = LoRAMapping(names, names, True)
        punica.update_metadata(mapping, numbers_of_adapters, options.slots + 1, 1000)
        slots = torch.tensor([name - 1 for name in names], dtype=torch.int32, device=DEVICE)
        found = measure(layers, Batch(num_tokens), slots, timer)
        failed |= not found["error"] < TOLERANCE
        record = {**head, "tokens": num_tokens, "adapters": adapters, "rank": options.rank,
                  "slots": options.slots, **found}  # fmt: skip
        if options.out:
            records.append(options.out, record)
        plugin, library = found["plugin_us"], found["library_us"]
        figures = (f"{plugin:.1f}", f"{library:.1f}", f"{plugin / library:.3f}")
        rows.append([str(num_tokens), str(adapters), *figures, f"{found['error']:.1e}"])
    head_line = ("T", "adapters", "plugin us", "library us", "plugin/library", "difference")
    print(text_table(head_line, rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
