"""SGLang's own layers, memory pool and LoRA manager with moegraft behind them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import DEVICE, LAYERS, RANK, SLOTS, Case, E, Engine, error, expected

from moegraft.hosts.sglang.counters import counters

LIMIT = 1e-5 if DEVICE == "cpu" else 2e-3  # TF32 products on a GPU
GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 2.0}
NAMES = ("a", None, "b", "b", None, "half", "a", "half", None)


def with_adapters(engine: Engine) -> Engine:
    """Two adapters of different ranks, and one for half of the experts."""
    engine.add("a")
    engine.add("b", rank=3, seed=2)
    engine.add("half", rank=5, seed=3, experts=range(E // 2))
    return engine


def test_adapters_and_base_rows_in_one_batch(engine: Engine) -> None:
    with_adapters(engine)
    start = counters()
    engine.prepare(NAMES)
    case = Case(len(NAMES))
    for layer in range(LAYERS):
        found, wanted = engine.run(case, layer), expected(engine, case, NAMES, layer)
        assert error(found, wanted) < LIMIT
        assert error(wanted, expected(engine, case, [None] * len(NAMES), layer)) > 0.05
        rows = torch.tensor([name is None for name in NAMES], device=DEVICE)
        engine.prepare([None] * len(NAMES))
        base = engine.run(case, layer)
        assert torch.equal(found[rows], base[rows]) and not torch.equal(found, base)
        engine.prepare(NAMES)
    end = counters()
    assert end["expert_calls"] - start["expert_calls"] == 2 * LAYERS
    assert end["expert_calls_with_adapters"] - start["expert_calls_with_adapters"] == LAYERS
    assert end["slots_loaded"] - start["slots_loaded"] == 3


def test_all_slot_tensors_are_read_in_place(engine: Engine) -> None:
    for layer in range(LAYERS):
        wrapper = engine.wrapper(layer)
        assert wrapper._moegraft.pool.copied_bytes == 0
        assert wrapper.gate_up_lora_b_weights.transpose(2, 3).is_contiguous()
        assert (
            wrapper.gate_up_lora_b_weights
            is engine.manager.memory_pool.B_buffer["gate_up_proj_moe"][layer]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu"},
        {"activation": "gelu_tanh"},
        {"activation": "silu", "is_gated": False},
        {"activation": "relu2", "is_gated": False},
        GPT_OSS,
        {"routed_scaling_factor": 2.5},
    ],
    ids=str,
)
def test_other_formulas(tmp_path: Path, options: dict[str, Any]) -> None:
    engine = with_adapters(Engine(tmp_path, **options))
    assert engine.wrapper()._moegraft is not None
    engine.prepare(NAMES)
    case = Case(len(NAMES))
    assert error(engine.run(case), expected(engine, case, NAMES, **options)) < LIMIT


def test_outer_factors_that_all_experts_share(tmp_path: Path) -> None:
    engine = Engine(tmp_path, shared_outer=True)
    engine.add("a")
    engine.add("b", rank=3, seed=2)
    names = ("a", "b", None, "a")
    assert engine.wrapper().gate_up_lora_a_weights.shape[1] == 1
    engine.prepare(names)
    case = Case(len(names))
    assert error(engine.run(case), expected(engine, case, names)) < LIMIT


def test_slots_change_hands_and_adapters_go(engine: Engine) -> None:
    for seed, name in enumerate(("a", "b", "c", "d"), start=1):
        engine.add(name, rank=1 + 2 * seed if seed < 4 else 2, seed=seed)
    case = Case(4)
    batches = (("a", "b", None, "c"), ("d", None, "b", "d"), ("a", "c", "a", None))
    assert len({name for names in batches for name in names}) > SLOTS
    for names in (*batches, batches[0]):
        engine.prepare(names)
        assert error(engine.run(case), expected(engine, case, names)) < LIMIT
    slot = engine.manager.memory_pool.uid_to_buffer_id["a"]
    assert engine.manager.unload_lora_adapter(engine.ref("a")).success
    table = engine.wrapper()._moegraft.pool.table
    assert not bool(table.host_ranks[slot].any())
    engine.prepare(("b", None, "c", "b"))
    assert error(engine.run(case), expected(engine, case, ("b", None, "c", "b"))) < LIMIT


def test_an_adapter_that_does_not_fit_leaves_its_slot_empty(engine: Engine) -> None:
    engine.add("a")
    engine.prepare(("a", None))
    adapter = engine.manager.loras["a"]
    name = next(n for n in adapter.layers[1].weights if "down_proj" in n and "lora_A" in n)
    adapter.layers[1].weights[name] = adapter.layers[1].weights[name][:, :-1]
    pool = engine.manager.memory_pool
    slot = pool.uid_to_buffer_id["a"]
    with pytest.raises(AssertionError, match="does not match"):
        pool.load_lora_weight_to_buffer("a", slot, adapter, engine.manager.lora_modules, None, None)
    for layer in range(LAYERS):
        assert not bool(engine.wrapper(layer)._moegraft.pool.table.host_ranks[slot].any())


def test_router_weights_on_the_input(tmp_path: Path) -> None:
    engine = Engine(tmp_path, apply_router_weight_on_input=True)
    engine.add("a")
    names = ("a", None, "a")
    engine.prepare(names)
    case = Case(3, top_k=1)
    found = engine.run(case)
    case.x, case.weights = case.x * case.weights, torch.ones_like(case.weights)
    assert error(found, expected(engine, case, names)) < LIMIT


def test_rows_past_the_slots_of_a_batch_are_base_rows(engine: Engine) -> None:
    names = ("a", "b", "c", "d")
    for seed, name in enumerate(names):
        engine.add(name, seed=seed)
    engine.prepare(names)
    assert set(engine.manager.memory_pool.uid_to_buffer_id.values()) == set(range(SLOTS))
    case = Case(7)
    wanted = expected(engine, case, (*names, None, None, None))
    assert error(engine.run(case), wanted) < LIMIT


def test_layers_share_the_slots_until_a_capture_begins(engine: Engine) -> None:
    engine.add("a")
    engine.prepare(("a", None))
    case, backend = Case(2), engine.manager.lora_backend
    engine.run(case, 0)
    first = backend._moegraft_slots[1]
    engine.run(case, 1)
    assert backend._moegraft_slots[1] is first
    engine.manager.reset_routing_cache()
    engine.run(case, 0)
    assert backend._moegraft_slots[1] is not first


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"no_combine": True, "inplace": False}, "not summed"),
        ({"swiglu_limit": 10.0}, "clamped in a way of its own"),
        ({"gemm1_clamp_limit": 7.0}, "clamped in a way of its own"),
        ({"activation": "situ"}, "no activation 'situ'"),
        ({**GPT_OSS, "gate_up_interleaved": False}, "interleaved SwiGLU only"),
    ],
)
def test_what_is_left_to_sglang_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.WARNING, "sglang.srt.moegraft"):
        engine = Engine(tmp_path, **options)
    lines = [r.getMessage() for r in caplog.records if "leaves experts to SGLang" in r.getMessage()]
    assert len(lines) <= 1 and all(reason in line for line in lines)
    for layer in range(LAYERS):
        assert engine.wrapper(layer)._moegraft is None
        assert engine.wrapper(layer).gate_up_lora_b_weights.is_contiguous()
    engine.add("a", rank=RANK)
    engine.prepare(("a", None))  # its slots go on as without the plugin


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
def test_a_captured_call_follows_the_slots_of_each_replay(engine: Engine) -> None:
    with_adapters(engine)
    case = Case(len(NAMES))
    engine.manager.init_cuda_graph_moe_buffers(len(NAMES), SLOTS, torch.float32, engine.wrapper())
    engine.manager.init_decode_cuda_graph_batch_info(len(NAMES), 1)
    engine.prepare(NAMES)
    engine.manager.reset_routing_cache()
    engine.run(case)
    graph = torch.cuda.CUDAGraph()
    engine.manager.reset_routing_cache()
    with torch.cuda.graph(graph):
        found = engine.run(case)
    for names in (NAMES, NAMES[::-1], (None,) * len(NAMES)):
        engine.prepare(names)
        graph.replay()
        assert error(found, expected(engine, case, names)) < LIMIT
