"""Siblings (q, k, v) served together equal siblings served one by one, and leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from moegraft.errors import MoegraftError
from moegraft.hosts.transformers import Graft
from moegraft.hosts.transformers.siblings import SiblingGroup, find_siblings
from moegraft.linear import LinearLoraGroup
from moegraft.testing import assert_bit_equal
from tiny_grafts import (
    LOADED,
    ROWS,
    assert_rows_equal_merged,
    graft_of,
    load_cases,
    new_graft,
    prompts,
)

ATTENTION = "model.layers.0.self_attn"


def fused_graft(name: str = "qwen3_moe") -> Graft:
    graft = new_graft(name, fuse_linears=True)
    load_cases(graft, LOADED[name])
    return graft


def groups_of(graft: Graft) -> list[SiblingGroup]:
    return [handle for handle in graft._handles if isinstance(handle, SiblingGroup)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of linears of each group call."""
    seen: list[int] = []
    original = LinearLoraGroup.add_to

    def add_to(group: LinearLoraGroup, outs: Any, x: Any, slots: Any) -> None:
        seen.append(len(group.linears))
        original(group, outs, x, slots)

    monkeypatch.setattr(LinearLoraGroup, "add_to", add_to)
    return seen


@pytest.mark.parametrize("name", tiny.MODELS)
def test_rows_of_a_mixed_batch_equal_their_merged_models(name: str) -> None:
    assert_rows_equal_merged(fused_graft(name), ROWS[name], prompts(len(ROWS[name])))


def test_q_k_and_v_are_one_call_with_the_bits_of_single_calls(calls: list[int]) -> None:
    rows = ROWS["qwen3_moe"]
    inputs = prompts(len(rows))
    graft = fused_graft()
    found = graft.forward(**inputs, adapters=rows).logits
    layers = graft.model.config.num_hidden_layers
    assert calls == [3] * layers
    assert_bit_equal(found, graft_of("qwen3_moe").forward(**inputs, adapters=rows).logits)
    assert all(group.shares for group in groups_of(graft))


def test_base_rows_and_adapters_of_other_sites_cost_no_group_call(calls: list[int]) -> None:
    inputs, graft = prompts(2), fused_graft()
    graft.forward(**inputs)
    graft.forward(**inputs, adapters="peft/0.21.2/qwen3_moe/router")
    assert not calls


def test_detach_takes_the_shadows_away() -> None:
    graft = fused_graft()
    module = graft.model.get_submodule(f"{ATTENTION}.k_proj")
    assert "forward" in vars(module)
    graft.detach()
    assert all("forward" not in vars(m) for m in graft.model.modules())


def test_another_tensor_gets_its_own_product_and_ends_the_sharing() -> None:
    graft = fused_graft()
    q, k = (graft.model.get_submodule(f"{ATTENTION}.{name}") for name in ("q_proj", "k_proj"))
    x = torch.randn(2, 3, q.in_features, generator=torch.Generator().manual_seed(0))
    alone = graft_of("qwen3_moe")
    case = "peft/0.21.2/qwen3_moe/all_linear"

    def run(owner: Graft, order: list[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        with owner.rows([case, None], 2), torch.no_grad():
            rows = owner._state._rows.get()
            assert rows is not None
            with owner._state.use_step(rows.spread(2, 3), 2):
                return [owner.model.get_submodule(f"{ATTENTION}.{n}")(v) for n, v in order]

    copy = x.clone()
    for order in (
        [("q_proj", x), ("k_proj", copy), ("v_proj", x)],
        [("q_proj", x), ("q_proj", x), ("v_proj", copy)],
        [("v_proj", x), ("k_proj", x), ("q_proj", x)],
    ):
        for found, expected in zip(run(graft, order), run(alone, order), strict=True):
            assert_bit_equal(found, expected)
    first = groups_of(graft)[0]
    assert not first.shares and groups_of(graft)[1].shares
    assert_bit_equal(k(x), nn.functional.linear(x, k.weight, k.bias))


def test_a_tensor_changed_between_siblings_is_not_taken_for_the_same() -> None:
    graft, case = fused_graft(), "peft/0.21.2/qwen3_moe/all_linear"
    q, k = (graft.model.get_submodule(f"{ATTENTION}.{name}") for name in ("q_proj", "k_proj"))
    x = torch.ones(1, 2, q.in_features)
    with graft.rows(case, 1), torch.no_grad():
        rows = graft._state._rows.get()
        assert rows is not None
        with graft._state.use_step(rows.spread(1, 2), 1):
            q(x)
            x.mul_(2)
            found = k(x)
            assert_bit_equal(found, k(x.clone()))


def test_a_forward_cut_short_leaves_nothing_and_keeps_sharing() -> None:
    graft, rows = fused_graft(), ["peft/0.21.2/qwen3_moe/all_linear", None]
    inputs = prompts(2)
    expected = graft.forward(**inputs, adapters=rows).logits
    k = graft.model.get_submodule(f"{ATTENTION}.k_proj")

    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("stop here")

    handle = k.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        graft.forward(**inputs, adapters=rows)
    handle.remove()
    assert all(getattr(group._thread, "kept", None) is None for group in groups_of(graft))
    assert_bit_equal(graft.forward(**inputs, adapters=rows).logits, expected)
    assert all(group.shares for group in groups_of(graft))


def test_only_plain_linears_of_one_size_are_siblings() -> None:
    class Other(nn.Linear):
        pass

    def linears(**modules: nn.Module) -> dict[str, nn.Module]:
        return {f"a.{name}": module for name, module in modules.items()}

    plain = nn.Linear(4, 2)
    assert list(find_siblings(linears(q_proj=plain, k_proj=plain, o_proj=plain))) == [
        ("a.q_proj", "a.k_proj")
    ]
    assert list(find_siblings({"gate_proj": plain, "up_proj": plain})) == [("gate_proj", "up_proj")]
    assert not list(find_siblings(linears(q_proj=plain, k_proj=Other(4, 2))))
    assert not list(find_siblings(linears(q_proj=plain, k_proj=nn.Linear(5, 2))))
    assert not list(find_siblings(linears(q_proj=plain)))


def test_a_sibling_can_not_be_copied_while_attached() -> None:
    graft = fused_graft()
    attention = graft.model.get_submodule(ATTENTION)
    with pytest.raises(MoegraftError, match="detach"):
        copy.deepcopy(attention)
    graft.detach()
    copy.deepcopy(attention)
