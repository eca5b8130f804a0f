"""vLLM's linears with adapters: real layers and wrappers, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_cases import DEVICE, IDS, TOKENS, R, S, T, make_punica, set_tokens
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.lora import utils
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from moegraft.hosts.vllm.counters import counters
from moegraft.hosts.vllm.plugin import register

IN, HEAD = 64, 32
LIMIT = 1e-4 if DEVICE == "cpu" else 5e-3  # TF32 products on a GPU
#: Name of the wrapper -> layer, names of its slices in files, and their widths.
KINDS: dict[str, tuple[Any, list[str], list[int]]] = {
    "ReplicatedLinearWithLoRA": (lambda: ReplicatedLinear(IN, 48, bias=False), [], [48]),
    "RowParallelLinearWithLoRA": (lambda: RowParallelLinear(IN, 48, bias=False), [], [48]),
    "MergedColumnParallelLinearWithLoRA": (
        lambda: MergedColumnParallelLinear(IN, [48, 48], bias=False),
        ["gate_proj", "up_proj"],
        [48, 48],
    ),
    "MergedQKVParallelLinearWithLoRA": (
        lambda: QKVParallelLinear(IN, HEAD, 4, 2, bias=False),
        ["q_proj", "k_proj", "v_proj"],
        [4 * HEAD, 2 * HEAD, 2 * HEAD],
    ),
    "QKVParallelLinearWithLoRA": (
        lambda: QKVParallelLinear(IN, HEAD, 4, 2, bias=False),
        ["qkv"],
        [8 * HEAD],
    ),
    "MergedColumnParallelLinearVariableSliceWithLoRA": (
        lambda: MergedColumnParallelLinear(IN, [48, 16, 32], bias=False),
        [],
        [48, 16, 32],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vLLM's layers need around them, with the plugin in this process."""
    register()
    init: Path = tmp_path_factory.mktemp("distributed") / "init"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{init}", 0, backend="gloo")
        initialize_model_parallel()
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


def wrapped(name: str) -> tuple[Any, torch.Tensor, list[int]]:
    """Make a layer and let vLLM wrap it; return its weight too, which the CPU packs away."""
    make, parts, widths = KINDS[name]
    torch.manual_seed(0)
    layer = make().to(DEVICE)
    torch.nn.init.normal_(layer.weight, std=0.2)
    weight = layer.weight.detach().clone()
    layer.quant_method.process_weights_after_loading(layer)
    config = LoRAConfig(max_lora_rank=R, max_loras=S, lora_dtype=torch.float32)
    wrapper = utils.from_layer(layer, S, config, parts, None)
    assert type(wrapper).__name__ == name and "moegraft" in type(wrapper).__module__
    wrapper.set_mapping(make_punica(config))
    return wrapper, weight, widths


def filled(wrapper: Any, name: str, widths: list[int]) -> list[list[tuple[Any, Any]]]:
    """Put adapters into slots 0 and 1; return per slot and slice A and B, or None."""
    generator = torch.Generator().manual_seed(1)
    held = []
    for slot, rank in enumerate((R, 3)):
        a = [(torch.randn(rank, IN, generator=generator) / 4).to(DEVICE) for _ in widths]
        b = [(torch.randn(width, rank, generator=generator) / 4).to(DEVICE) for width in widths]
        if name == "MergedColumnParallelLinearVariableSliceWithLoRA" or len(widths) == 1:
            a = [a[0]] * len(widths)
            wrapper.set_lora(slot, a[0], torch.cat(b))
            held.append(list(zip(a, b, strict=True)))
            continue
        pairs: list[tuple[Any, Any]] = list(zip(a, b, strict=True))
        if slot == 1:
            pairs[-1] = (None, None)  # such as an adapter for q and k without v
        wrapper.set_lora(slot, [a for a, _ in pairs], [b for _, b in pairs])
        held.append(pairs)
    return held


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_linear_adds_each_tokens_own_delta(name: str) -> None:
    start = counters()["linear_calls"]
    wrapper, weight, widths = wrapped(name)
    assert all(b.transpose(2, 3).is_contiguous() for b in wrapper.lora_b_stacked)
    held = filled(wrapper, name, widths)
    x = torch.randn(T, IN, device=DEVICE)
    base = x @ weight.t()
    wanted = base.clone()
    for t, token in enumerate(TOKENS):
        for part, (a, b) in zip(
            wanted[t].split(widths), held[IDS.index(token)] if token else [], strict=bool(token)
        ):
            if a is not None:
                part += b @ (a @ x[t])
    found = wrapper(x)[0]
    torch.testing.assert_close(found, wanted, rtol=LIMIT, atol=LIMIT)
    rows = torch.tensor([token == 0 for token in TOKENS])
    torch.testing.assert_close(found[rows], base[rows], rtol=1e-5, atol=1e-5)
    assert counters()["linear_calls"] == start + 1
    compiled = torch.compile(wrapper, fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], found, rtol=1e-5, atol=1e-5)
    set_tokens(wrapper.punica_wrapper, (0,) * T)
    torch.testing.assert_close(compiled(x)[0], base, rtol=LIMIT, atol=LIMIT)
    assert counters()["linear_calls"] == start + 2


def test_a_slot_that_is_reset_adds_nothing() -> None:
    wrapper, weight, widths = wrapped("MergedQKVParallelLinearWithLoRA")
    filled(wrapper, "MergedQKVParallelLinearWithLoRA", widths)
    x = torch.randn(T, IN, device=DEVICE)
    wrapper.reset_lora(0)
    wrapper.reset_lora(1)
    base = x @ weight.t()
    torch.testing.assert_close(wrapper(x)[0], base, rtol=1e-5, atol=1e-5)


def test_the_hash_that_names_compiled_models_tells_of_moegraft() -> None:
    config = LoRAConfig(max_lora_rank=R, max_loras=S)
    assert "-moegraft-" in config.compute_hash()
