"""``bench cpu``: one MoE layer on a CPU beside its limit and Transformers' own experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moegraft.bench.cpu_turns import Spent, in_turns
from moegraft.bench.records import Record
from moegraft.bench.shapes import ModelShape
from moegraft.errors import MoegraftError
from moegraft.factor_table import site_table
from moegraft.layer import MoeLoraLayer
from moegraft.sites import expert_site
from moegraft.testing import random_activations, random_factors, random_routing, relative_error
from moegraft.types import ExpertWeights, TokenSlots

#: Elements of the memory whose read gives the bandwidth: 268 MB, more than caches hold.
_READ_ELEMENTS = 1 << 26
#: Rows of the product that gives the rate of arithmetic.
_PRODUCT_ROWS = 512
#: Largest ``||a - b|| / ||b||`` between two ways in fp32 and in bf16.
_AGREE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class CpuLayerOptions:
    """What to measure of one layer.

    Attributes:
        shape: its sizes; SwiGLU.
        tokens: every T.
        dtype: of weights and activations.
        adapters, rank: live ones, tokens in turn.
        backends: which of ours; the first is what the table compares.
        turns, seconds: see :func:`moegraft.bench.cpu_turns.in_turns`.
    """

    shape: ModelShape
    tokens: tuple[int, ...]
    dtype: torch.dtype
    adapters: int
    rank: int
    backends: tuple[str, ...]
    turns: int
    seconds: float


def run_layers(options: CpuLayerOptions, say: Callable[[str], None]) -> Iterator[Record]:
    """Measure one layer at every T; yields a record for each.

    Raises:
        MoegraftError: no transformers, or ways that don't agree on the result.
    """
    shape, dtype = options.shape, options.dtype
    experts = _experts(shape, dtype)
    weights = ExpertWeights(experts.gate_up_proj.data, experts.down_proj.data)
    site = expert_site("experts", shape.num_experts, shape.hidden, shape.intermediate)
    factors = [
        random_factors(site, options.rank, "separate", seed=seed, dtype=dtype)
        for seed in range(options.adapters)
    ]
    table = site_table(site, factors, dtype)
    layers = {name: MoeLoraLayer(weights, table, backend=name) for name in options.backends}
    memory = torch.ones(_READ_ELEMENTS)
    for tokens in options.tokens:
        say(f"{shape.name} {dtype} T={tokens}")
        x = random_activations(tokens, shape.hidden, dtype)
        routing = random_routing(tokens, shape.top_k, shape.num_experts, seed=1)
        ids, topk_weights = routing.topk_ids.long(), routing.topk_weights.to(dtype)
        slots = TokenSlots.of([t % options.adapters for t in range(tokens)])
        ways: dict[str, Callable[[], torch.Tensor]] = {}
        for name, layer in layers.items():
            ways[f"{name} base"] = _bound(layer, x, ids, topk_weights)
            ways[f"{name} lora"] = _bound(layer, x, ids, topk_weights, slots)
        for implementation in ("grouped_mm", "eager"):
            ways[implementation] = _transformers(experts, implementation, x, ids, topk_weights)
        _check_agreement(ways, dtype)
        limits = _limit_ways(memory, layers[options.backends[0]], shape, dtype)
        spent = in_turns({**ways, **limits}, options.turns, options.seconds)
        touched = int(ids.unique().numel())
        yield _record(options, tokens, touched, spent, layers)


def _record(
    options: CpuLayerOptions,
    tokens: int,
    touched: int,
    spent: dict[str, Spent],
    layers: dict[str, MoeLoraLayer],
) -> Record:
    shape = options.shape
    values = 3 * shape.hidden * shape.intermediate
    num_bytes = touched * values * options.dtype.itemsize
    flops = 2 * tokens * shape.top_k * values
    products = {
        "product": 4 * _PRODUCT_ROWS * _own(shape),
        "own product": 6 * _PRODUCT_ROWS * _own(shape),
    }

    def limit(seconds: Callable[[Spent], float]) -> tuple[float, float, float]:
        """Return the limit, bytes read per second, and the best rate of products."""
        read = 4 * _READ_ELEMENTS / seconds(spent["read"])
        rate = max(work / seconds(spent[name]) for name, work in products.items())
        return max(num_bytes / read, flops / rate), read, rate

    median, read, rate = limit(lambda found: found.median)
    return {
        "part": "layer",
        "model": shape.name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "tokens": tokens,
        "adapters": options.adapters,
        "rank": options.rank,
        "touched_experts": touched,
        "limits": {"read_gb_s": read / 1e9, "product_gflops": rate / 1e9},
        "limit_us": median * 1e6,
        "limit_us_least": limit(lambda found: found.least)[0] * 1e6,
        "limit_is": "memory" if num_bytes / read >= flops / rate else "arithmetic",
        "backends": list(options.backends),
        "ways": {
            name: found.record() for name, found in spent.items() if name not in ("read", *products)
        },
        "why": list(layers[options.backends[0]].plan(tokens, shape.top_k).reasons),
    }


def _own(shape: ModelShape) -> int:
    return shape.hidden * shape.intermediate


def _limit_ways(
    memory: torch.Tensor, layer: MoeLoraLayer, shape: ModelShape, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """What the limits are made of: a read of memory; one expert's products, torch's and ours."""
    rows = random_activations(_PRODUCT_ROWS, shape.hidden, dtype)
    weight = layer.weights.gate_up[0].t()
    ids = torch.zeros(_PRODUCT_ROWS, 1, dtype=torch.int64)
    ones = torch.ones(_PRODUCT_ROWS, 1)
    return {
        "read": memory.sum,
        "product": lambda: torch.mm(rows, weight),
        "own product": lambda: layer(rows, ids, ones),
    }


def _bound(layer: MoeLoraLayer, *arguments: Any) -> Callable[[], torch.Tensor]:
    return lambda: layer(*arguments)


def _experts(shape: ModelShape, dtype: torch.dtype) -> Any:
    """Return transformers' experts module with random weights."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        raise MoegraftError(
            "`bench cpu` compares with transformers >= 5.17: pip install -e '.[transformers]' in "
            f"the clone of moegraft ({error})."
        ) from error
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    generator = torch.Generator().manual_seed(0)
    experts = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator)
    return experts


def _transformers(
    experts: Any, implementation: str, *arguments: torch.Tensor
) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        experts.config._experts_implementation = implementation
        with torch.no_grad():
            found: torch.Tensor = experts(*arguments)
        return found

    return run


def _check_agreement(ways: dict[str, Callable[[], torch.Tensor]], dtype: torch.dtype) -> None:
    """Raise unless all base ways agree, and all with LoRA: a wrong result has no speed."""
    for kind in ("lora", "base"):
        found = {
            name: run() for name, run in ways.items() if name.endswith("lora") == (kind == "lora")
        }
        (first, wanted), *others = found.items()
        for name, result in others:
            error = relative_error(result, wanted)
            if not error <= _AGREE[dtype]:
                raise MoegraftError(
                    f"{name} and {first} differ by {error:.2g} in {dtype}, at most "
                    f"{_AGREE[dtype]:g} is right: this is a fault, nothing was timed."
                )
