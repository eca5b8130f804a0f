"""What people do to an attached model that could make it lie: each is right, or a clear error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

import moegraft
import tiny
from moegraft.errors import AdapterError, MoegraftError, UnsupportedError

CASES = "peft/0.21.2/qwen3_moe/"
INPUT_IDS = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))


def new_graft() -> Any:
    """Attach a fresh tiny model and load an adapter on its experts."""
    graft = moegraft.attach(tiny.new_model("qwen3_moe"))
    graft.load("experts", tiny.folder(CASES + "experts"))
    return graft


def logits(graft: Any, adapters: Any = "experts") -> torch.Tensor:
    """Score the fixed input."""
    found: torch.Tensor = graft.forward(input_ids=INPUT_IDS, adapters=adapters).logits
    return found


def test_an_interrupt_in_a_router_leaves_nothing_behind() -> None:
    graft = moegraft.attach(tiny.new_model("qwen3_moe"))
    graft.load("router", tiny.folder("peft/0.18.0/qwen3_moe/router"))
    wanted = tiny.base_model("qwen3_moe")(INPUT_IDS).logits

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    gate = graft.model.model.layers[1].mlp.gate
    handle = gate.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(graft, "router")
    handle.remove()
    assert torch.equal(tiny.base_model("qwen3_moe")(INPUT_IDS).logits, wanted)
    assert torch.equal(graft.model.model(INPUT_IDS)[0], graft.model.model(INPUT_IDS)[0])
    first = logits(graft, "router")
    assert torch.equal(first, logits(graft, "router"))
    assert not torch.equal(first, logits(graft, None))


def replace_parameter(model: nn.Module) -> None:
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    experts.down_proj = nn.Parameter(experts.down_proj.detach() * 3)


def reload_with_assign(model: nn.Module) -> None:
    state = {k: v * 3 if "experts" in k else v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def cast(model: nn.Module) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [replace_parameter, reload_with_assign, cast])
def test_expert_weights_replaced_after_attach_are_an_error(
    change: Callable[[nn.Module], None],
) -> None:
    graft = new_graft()
    change(graft.model)
    with pytest.raises(MoegraftError, match="were replaced after attach"):
        logits(graft)
    with pytest.raises(MoegraftError, match="were replaced after attach"):
        graft.model(INPUT_IDS)
    graft.detach()
    graft.model(INPUT_IDS)


def test_a_state_dict_loaded_in_place_is_followed() -> None:
    graft = new_graft()
    before = logits(graft, None)
    state = {
        k: v * 1.5 if "experts" in k else v.clone() for k, v in graft.model.state_dict().items()
    }
    graft.model.load_state_dict(state)
    after = logits(graft, None)
    graft.detach()
    assert not torch.allclose(before, after)
    assert torch.allclose(graft.model(INPUT_IDS).logits, after, atol=1e-5)


def test_a_replaced_linear_is_an_error() -> None:
    graft = new_graft()
    attention = graft.model.model.layers[0].self_attn
    attention.q_proj = nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features)
    with pytest.raises(MoegraftError, match=r"q_proj was replaced"):
        logits(graft)


def test_models_that_peft_wrapped_are_refused_and_unchanged() -> None:
    model = tiny.new_model("qwen3_moe")
    wrapped = peft.PeftModel.from_pretrained(model, tiny.folder(CASES + "experts"))
    before = wrapped(INPUT_IDS).logits
    for each in (wrapped, model):
        with pytest.raises(UnsupportedError, match="PEFT"):
            moegraft.attach(each)
    assert torch.equal(wrapped(INPUT_IDS).logits, before)


def test_peft_on_an_attached_model_is_an_error() -> None:
    graft = new_graft()
    wrapped = peft.PeftModel.from_pretrained(graft.model, tiny.folder(CASES + "experts"))
    with pytest.raises(MoegraftError, match="replaced after attach"):
        wrapped(INPUT_IDS)


def test_another_experts_implementation_is_an_error_for_adapters() -> None:
    graft = new_graft()
    graft.model.set_experts_implementation("eager")
    with pytest.raises(MoegraftError, match="'eager'"):
        logits(graft)
    graft.detach()


def test_models_with_one_config_object_are_told_apart() -> None:
    model = tiny.new_model("qwen3_moe")
    other = type(model)(model.config)
    graft = moegraft.attach(model)
    with pytest.raises(UnsupportedError, match="shares its config"):
        moegraft.attach(other)
    with pytest.raises(MoegraftError, match="config of its own"):
        other(INPUT_IDS)
    graft.detach()
    other(INPUT_IDS)


def test_a_part_of_an_attached_model_cannot_be_attached() -> None:
    graft = new_graft()
    wanted = logits(graft)
    with pytest.raises(UnsupportedError, match="attached already"):
        moegraft.attach(graft.model.model)
    assert torch.equal(logits(graft), wanted)


def test_a_forward_inside_a_forward_leaves_the_outer_one_right() -> None:
    graft = new_graft()
    wanted = logits(graft)
    handles = []

    def nested(*_: Any) -> None:
        handles.pop().remove()
        logits(graft, None)

    handles.append(graft.model.model.layers[0].register_forward_hook(nested))
    assert torch.equal(logits(graft), wanted)


def test_a_part_of_the_model_called_within_rows_is_an_error() -> None:
    graft = new_graft()
    with graft.rows("experts", 2), pytest.raises(MoegraftError, match="called by itself"):
        graft.model.model(INPUT_IDS)


def test_inference_mode_leaves_no_trace() -> None:
    with torch.inference_mode():
        graft = new_graft()
        wanted = logits(graft).clone()
    graft.load("experts", tiny.folder(CASES + "experts"))
    assert torch.equal(logits(graft), wanted)
    with graft.rows("experts", 2):
        with_gradients = graft.model(INPUT_IDS).logits
    assert torch.equal(with_gradients, wanted)
    graft.unload("experts")
    assert graft.adapters == () and graft.bank.memory.used == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    wanted = logits(new_graft())
    model = tiny.new_model("qwen3_moe")
    try:
        torch.set_default_dtype(dtype)
        graft = moegraft.attach(model)
        graft.load("experts", tiny.folder(CASES + "experts"))
        found = logits(graft)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_copies_and_pickles_of_attached_models_are_refused() -> None:
    graft = new_graft()
    with pytest.raises(MoegraftError, match="detach"):
        copy.deepcopy(graft.model)
    with pytest.raises((MoegraftError, AttributeError, pickle.PicklingError)):
        pickle.dumps(graft.model)
    graft.detach()
    copy.deepcopy(graft.model)


@pytest.mark.parametrize("adapters", [{"experts", None}, [1, "experts"], 5, [["experts"], None]])
def test_adapters_must_be_a_list_of_names(adapters: Any) -> None:
    with pytest.raises(AdapterError, match="no list of names"):
        logits(new_graft(), adapters)


@pytest.mark.parametrize("input_ids", [INPUT_IDS[0], INPUT_IDS.tolist(), INPUT_IDS[:0]])
def test_inputs_must_be_rows_of_tokens(input_ids: Any) -> None:
    with pytest.raises(AdapterError, match=r"\[rows, tokens\]"):
        new_graft().forward(input_ids=input_ids, adapters=None)


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.experts"])
def test_a_model_spread_over_devices_is_refused_and_unchanged(part: str) -> None:
    model = tiny.new_model("qwen3_moe")
    model.get_submodule(f"model.layers.1.{part}").to("meta")
    with pytest.raises(UnsupportedError, match=rf"layers\.1\.{part} is on meta.*first.*on cpu"):
        moegraft.attach(model)
    assert not moegraft_traces(model)


def moegraft_traces(model: nn.Module) -> list[str]:
    """Return what an attach has left on a model."""
    return [key for module in model.modules() for key in vars(module) if "moegraft" in key]


def test_a_detached_graft_says_so() -> None:
    graft = new_graft()
    graft.detach()
    for call in (lambda: graft.unload("experts"), lambda: graft.pin("experts")):
        with pytest.raises(MoegraftError, match="was detached"):
            call()
