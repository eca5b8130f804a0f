"""SGLang's own linears with adapters: slices in one launch, slots, what is left to SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine import ATTENTION, DEVICE, LAYERS, Case, Engine, error

from moegraft.hosts.sglang.counters import counters

LIMIT = 1e-5 if DEVICE == "cpu" else 2e-3  # TF32 products on a GPU
SLICES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}
NAMES = ("a", None, "b", "b", "experts", None, "a")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Adapters for attention of two ranks, and one for the experts alone."""
    engine = Engine(tmp_path, attention=True)
    engine.add_attention("a", rank=8, seed=1)
    engine.add_attention("b", rank=3, seed=2)
    engine.add("experts", rank=5, seed=3)
    return engine


def rows(engine: Engine, name: str, num_tokens: int) -> torch.Tensor:
    """Random inputs of a linear."""
    num_in = engine.linear(name).base_layer.weight.shape[1]
    return torch.randn(num_tokens, num_in, generator=torch.Generator().manual_seed(4)).to(DEVICE)


def expected(
    engine: Engine, name: str, layer: int, x: torch.Tensor, adapters: Sequence[str | None]
) -> torch.Tensor:
    """The formula, one row at a time, in fp64; alpha is twice the rank."""
    out = x.double().cpu() @ engine.linear(name, layer).base_layer.weight.double().cpu().t()
    for t, adapter in enumerate(adapters):
        tensors = engine.adapters.get(adapter or "", {})
        widths = [ATTENTION[leaf][0] for leaf in SLICES[name]]
        for leaf, part in zip(SLICES[name], out[t].split(widths), strict=True):
            key = f"base_model.model.model.layers.{layer}.self_attn.{leaf}.lora_"
            if f"{key}A.weight" in tensors:
                a, b = (tensors[f"{key}{ab}.weight"].double() for ab in "AB")
                part += 2.0 * b @ (a @ x[t].double().cpu())
    return out


@pytest.mark.parametrize("name", SLICES)
def test_adapters_and_base_rows_in_one_batch(engine: Engine, name: str) -> None:
    start = counters()["linear_calls"]
    engine.prepare(NAMES)
    x = rows(engine, name, len(NAMES))
    found = [engine.linear(name, layer)(x)[0] for layer in range(LAYERS)]
    assert counters()["linear_calls"] == start + LAYERS
    engine.prepare([None] * len(NAMES))
    for layer in range(LAYERS):
        wanted = expected(engine, name, layer, x, NAMES)
        assert error(found[layer], wanted) < LIMIT
        base = engine.linear(name, layer)(x)[0]
        assert error(base, wanted) > 0.05
        without = torch.tensor([n in (None, "experts") for n in NAMES], device=DEVICE)
        assert torch.equal(found[layer][without], base[without])
    assert counters()["linear_calls"] == start + LAYERS


def test_slots_change_hands_and_adapters_go(engine: Engine) -> None:
    engine.add_attention("c", rank=1, seed=5)
    x = rows(engine, "qkv_proj", 4)
    batches = (("a", "b", None, "a"), ("c", "experts", "b", None), ("c", "c", "a", "b"))
    for names in (*batches, batches[0]):
        engine.prepare(names)
        found = engine.linear("qkv_proj")(x)[0]
        assert error(found, expected(engine, "qkv_proj", 0, x, names)) < LIMIT
    slot = engine.manager.memory_pool.uid_to_buffer_id["a"]
    assert engine.manager.unload_lora_adapter(engine.ref("a")).success
    table = engine.linear("qkv_proj")._moegraft_linear.pool.pool.table
    assert not bool(table.host_ranks[slot].any())


def test_experts_and_linears_share_a_batchs_slots(engine: Engine) -> None:
    engine.prepare(NAMES)
    backend = engine.manager.lora_backend
    engine.linear("qkv_proj")(rows(engine, "qkv_proj", len(NAMES)))
    slots = backend._moegraft_slots[1]
    engine.run(Case(len(NAMES)))
    assert backend._moegraft_slots[1] is slots


def test_the_delta_is_added_before_the_ranks_results_are_summed(engine: Engine) -> None:
    engine.prepare(NAMES)
    x, wrapper = rows(engine, "o_proj", len(NAMES)), engine.linear("o_proj")
    found = engine.manager.lora_backend.forward_with_base(
        wrapper, x, lambda: x @ wrapper.base_layer.weight.t(), wrapper.lora_a, wrapper.lora_b,
        wrapper.output_offset, wrapper.lora_offsets, all_reduce=lambda part: 3 * part,
    )  # fmt: skip
    assert error(found, 3 * expected(engine, "o_proj", 0, x, NAMES)) < LIMIT


def test_all_slot_tensors_are_read_in_place(engine: Engine) -> None:
    for name in SLICES:
        wrapper = engine.linear(name)
        assert wrapper._moegraft_linear.pool.pool.copied_bytes == 0
        assert wrapper.lora_b.transpose(1, 2).is_contiguous()
        assert wrapper.lora_b is engine.manager.memory_pool.B_buffer[name][0]


def test_what_is_left_to_sglang_keeps_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "off").mkdir()
    some = Engine(tmp_path, attention=True)
    monkeypatch.setenv("MOEGRAFT_SGLANG_LINEARS", "0")
    none = Engine(tmp_path / "off", attention=True)
    for engine, name in ((some, "kv_b_proj"), (none, "kv_b_proj"), (none, "qkv_proj")):
        assert not hasattr(engine.linear(name), "_moegraft_linear")
        assert engine.linear(name).lora_b.is_contiguous()
    assert none.wrapper()._moegraft is not None  # the experts go on
