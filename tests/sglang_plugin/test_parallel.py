"""One rank's experts, or one rank's part of each expert: SGLang slices, and sums over the ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import DEVICE, LAYERS, WIDTH, Case, E, Engine, error
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.runtime_context import get_parallel

LIMIT = 1e-5 if DEVICE == "cpu" else 2e-3  # TF32 products on a GPU
NAMES = ("a", None, "b", "b", "half", "a", None)


def place(kind: str, rank: int) -> dict[str, Any]:
    """SGLang's names for a rank of two; it checks that sizes and groups fit together."""
    group = SimpleNamespace(rank_in_group=rank, world_size=2)
    names = {"tp": ("tp", "attn_tp"), "ep": ("tp", "attn_tp", "moe_ep")}[kind]
    values: dict[str, Any] = {}
    for name in names:
        values |= {f"{name}_size": 2, f"{name}_rank": rank, f"{name}_group": group}
    return values | ({"moe_tp_size": 2, "moe_tp_rank": rank} if kind == "tp" else {})


def of_rank(whole: Engine, kind: str, rank: int) -> Engine:
    """The same model and adapters on one of two ranks; call with SGLang's context overridden."""
    engine = Engine(whole.root)
    for layer in range(LAYERS):
        full, mine = whole.wrapper(layer).base_layer, engine.wrapper(layer).base_layer
        if kind == "ep":
            experts = slice(rank * E // 2, (rank + 1) * E // 2)
            mine.w13_weight.data.copy_(full.w13_weight[experts])
            mine.w2_weight.data.copy_(full.w2_weight[experts])
        else:
            columns = slice(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
            halves = [side[:, columns] for side in full.w13_weight.chunk(2, 1)]
            mine.w13_weight.data.copy_(torch.cat(halves, 1))
            mine.w2_weight.data.copy_(full.w2_weight[:, :, columns])
    for name in whole.adapters:
        assert engine.manager.load_lora_adapter(engine.ref(name)).success
    return engine


@pytest.mark.parametrize("kind", ["ep", "tp"])
def test_the_ranks_results_add_up_to_the_whole_layers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard, "get_device", lambda: DEVICE)  # SGLang knows no CPU here
    whole = Engine(tmp_path)
    whole.add("a")
    whole.add("b", rank=3, seed=2)
    whole.add("half", rank=5, seed=3, experts=range(E // 2))
    whole.prepare(NAMES)
    case = Case(len(NAMES))
    parts = [torch.zeros_like(case.x) for _ in range(LAYERS)]
    for rank in range(2):
        with get_parallel().override(**place(kind, rank)):
            engine = of_rank(whole, kind, rank)
            weights = engine.wrapper().base_layer.w13_weight
            assert weights.shape[:2] == ((E // 2, 2 * WIDTH) if kind == "ep" else (E, WIDTH))
            engine.prepare(NAMES)
            for layer in range(LAYERS):
                parts[layer] += engine.run(case, layer)
    for layer in range(LAYERS):
        assert error(parts[layer], whole.run(case, layer).double().cpu()) < LIMIT
