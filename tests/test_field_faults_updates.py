"""Kinds of fault in updates of a serving model (RL training); see ``docs/field-faults.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from audit import adapter_files, what_happens
from moegraft.adapters import AdapterBank, AdapterStore, ModelSpec, bind, make_source
from moegraft.errors import AdapterError
from moegraft.hosts.transformers import Graft
from moegraft.sites import expert_site
from moegraft.testing import assert_bit_equal, assert_close
from moegraft.types import WeightLayout
from test_field_faults import experts_pairs
from test_host_lifecycle import A, B, assert_generates, at_step
from tiny_grafts import generate, new_graft, prompts

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def graft() -> Iterator[Graft]:
    """A fresh graft with a policy that is served."""
    graft = new_graft("qwen3_moe", max_adapters=2)
    graft.load_tensors("policy", tiny.tensors_of(A), tiny.config_of(A))
    graft.forward(**prompts(2), adapters="policy")
    yield graft
    graft.detach()


def base_tensors(tensors: Tensors) -> Tensors:
    return {key.replace("lora_A.weight", "weight"): t for key, t in tensors.items() if "_A" in key}


PAYLOADS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "nothing": (lambda t: {}, "none of its 0 tensors is a LoRA factor"),
    "base tensors only": (base_tensors, "none of its 8 tensors is a LoRA factor"),
    "a wrong prefix": (lambda t: {f"actor.{k}": v for k, v in t.items()}, "bound 0 of 16 tensors"),
    "another model": (
        lambda t: {k.replace("layers", "blocks"): v for k, v in t.items()},
        "bound 0 of 16 tensors",
    ),
    "one layer of two": (
        lambda t: {k: v for k, v in t.items() if "layers.0" in k},
        "leaves out factors",
    ),
    "half of a pair": (lambda t: dict(list(t.items())[1:]), "partner .* is missing"),
    "a filter on names": (
        lambda t: {k: v for k, v in t.items() if ".lora_A." in k},
        "partner .* is missing|bound 0 of",
    ),
    "a NaN": (lambda t: {**t, next(iter(t)): next(iter(t.values())) * torch.nan}, "NaN"),
}


@pytest.mark.parametrize(("change", "message"), PAYLOADS.values(), ids=PAYLOADS)
def test_an_update_that_would_serve_the_base_or_half_a_policy_is_an_error(
    graft: Graft, change: Callable[[Tensors], Tensors], message: str
) -> None:
    before, logits = graft.store.info("policy"), graft.forward(**prompts(2), adapters="policy")
    for config in (None, tiny.config_of(A)):
        with pytest.raises(AdapterError, match=message):
            graft.update("policy", change(tiny.tensors_of(A)), config)
    after = graft.store.info("policy")
    assert (after.version, after.checksum) == (before.version, before.checksum)
    assert_bit_equal(graft.forward(**prompts(2), adapters="policy").logits, logits.logits)


def test_version_and_checksum_say_which_values_are_served(graft: Graft) -> None:
    first = graft.store.info("policy")
    scaled = {k: 2 * t if "lora_B" in k else t for k, t in tiny.tensors_of(A).items()}
    second = graft.update("policy", scaled)
    third = graft.update("policy", tiny.tensors_of(A))
    assert first.version < second.version < third.version == graft.store.info("policy").version
    assert second.checksum != first.checksum == third.checksum


def test_a_trainers_live_tensors_and_config_object_need_no_file(graft: Graft) -> None:
    """What get_peft_model_state_dict() and LoraConfig.to_dict() give, on the trainer's model."""
    model = tiny.new_model("qwen3_moe")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules={"q_proj", "v_proj"},
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    trained = peft.get_peft_model(model, config)
    for name, tensors in (("policy", 1), ("again", 2)):
        with torch.no_grad():
            for key, parameter in trained.named_parameters():
                if "lora_B" in key:
                    parameter.mul_(tensors)
        state = peft.get_peft_model_state_dict(trained)
        with what_happens() as events:
            graft.load_tensors(name, state, config.to_dict())
        assert adapter_files(events) == []
        inputs = prompts(3)
        found = graft.forward(**inputs, adapters=[name, None, name]).logits
        with torch.no_grad():
            wanted = trained(**inputs).logits
        for row in (0, 2):
            real = inputs["attention_mask"][row].bool()
            assert_close(found[row][real], wanted[row][real], torch.float32)


@pytest.mark.parametrize("in_place", [True, False], ids=["update", "load"])
def test_an_update_with_live_references_returns_at_once(graft: Graft, in_place: bool) -> None:
    """Whoever waited for the running batch here would wait for ever: it is the same thread."""
    seen: list[int] = []

    def update() -> None:
        scaled = {k: 3 * t if "lora_B" in k else t for k, t in tiny.tensors_of(A).items()}
        if in_place:
            seen.append(graft.update("policy", scaled).version)
        else:
            seen.append(graft.load_tensors("policy", scaled, tiny.config_of(A)).version)

    old = generate(graft, prompts(2), adapters=["policy", None]).sequences
    stop = at_step(2, update)
    found = generate(graft, prompts(2), adapters=["policy", None], stopping_criteria=stop)
    assert torch.equal(found.sequences, old)
    assert graft.store.info("policy").version == seen[0]
    new = generate(graft, prompts(2), adapters=["policy", None]).sequences
    assert torch.equal(new[1], old[1]) and not torch.equal(new[0], old[0])


def test_an_unload_with_live_references_returns_at_once(graft: Graft) -> None:
    old = generate(graft, prompts(2), adapters=["policy", None]).sequences
    stop = at_step(2, lambda: graft.unload("policy"))
    found = generate(graft, prompts(2), adapters=["policy", None], stopping_criteria=stop)
    assert torch.equal(found.sequences, old)
    assert graft.adapters == () and graft.bank.memory.used == 0


def test_a_hundred_versions_under_names_of_their_own_take_turns_in_the_slots() -> None:
    graft, names = new_graft("qwen3_moe", max_adapters=4), []
    tensors, config = tiny.tensors_of(A), tiny.config_of(A)
    for step in range(100):
        changed = {k: t * (1 + step) if "lora_B" in k else t for k, t in tensors.items()}
        names.append(graft.load_tensors(f"step {step}", changed, config).name)
        graft.forward(**prompts(1), adapters=names[-1])
        resident = [info.name for info in graft.adapters if info.slot is not None]
        assert sorted(resident) == sorted(names[-4:])
        assert graft.bank.memory.used == 4 * graft.store.info(names[0]).num_bytes or step < 3
    for name in names:
        graft.unload(name)
    assert graft.bank.memory.used == 0 and graft.adapters == ()
    graft.detach()


def test_the_newest_of_two_versions_needs_no_slot_more() -> None:
    graft = new_graft("qwen3_moe", max_adapters=1)
    graft.load("policy", tiny.folder(A))
    for case in (B, A, B):
        assert_generates(graft, ["policy", None], [A if case is B else B, None])
        graft.load("policy", tiny.folder(case))
        assert_generates(graft, ["policy", None], [case, None])
    graft.detach()


class _Copies(TorchDispatchMode):
    """Counts the copies into one tensor's memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.storage = memory.untyped_storage().data_ptr()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].untyped_storage().data_ptr() == self.storage
        return func(*args, **(kwargs or {}))


def test_18_000_small_tensors_come_into_a_slot_in_few_copies() -> None:
    sites = tuple(
        expert_site(f"model.layers.{i}.mlp.experts", 100, 4, 4, WeightLayout()) for i in range(30)
    )
    tensors = {
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj.lora_{x}.weight": torch.full(
            (1, 4) if x == "A" else (4, 1), float(1 + e)
        )
        for i in range(30)
        for e in range(100)
        for p in ("gate", "up", "down")
        for x in "AB"
    }
    assert len(tensors) == 18_000
    bank = AdapterBank(sites, num_slots=1, max_rank=1, dtype=torch.float32, arena_bytes=1 << 20)
    store = AdapterStore(bank)
    store.add("policy", bind(make_source(tensors, {"r": 1}), ModelSpec(sites)))
    copies = _Copies(bank.site_table(sites[0].name).arena.data)
    with copies, store.use(["policy"]):
        assert 0 < copies.count <= 2 * len(sites)


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_the_gap_to_exact_log_probabilities_does_not_grow_with_the_rank(rank: int) -> None:
    """On fixed tokens, in bf16, against the same in fp32: no wider than without an adapter."""
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = {**experts_pairs(names, rank), **experts_pairs(names, rank, layer=1)}
    tensors = {key: tensor.bfloat16() / rank**0.25 for key, tensor in tensors.items()}
    inputs = prompts(6, length=12)

    def gaps(dtypes: tuple[torch.dtype, ...]) -> dict[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {"base": [], "policy": []}
        for dtype in dtypes:
            model = new_graft("qwen3_moe", dtype)
            with torch.no_grad():  # the very weights of the bf16 model in both
                for parameter in model.model.parameters():
                    parameter.copy_(parameter.bfloat16())
            model.load_tensors("policy", tensors, {"r": rank, "lora_alpha": rank})
            for name in found:
                rows = None if name == "base" else name
                logits = model.forward(**inputs, adapters=rows).logits.float()
                found[name].append(logits.log_softmax(-1)[inputs["attention_mask"].bool()])
            model.detach()
        return {name: (a - b).abs() for name, (a, b) in found.items()}

    gap = gaps((torch.float32, torch.bfloat16))
    # A few tokens near a tie of the router differ in any dtype: medians, not means.
    assert gap["policy"].median() <= 1.5 * gap["base"].median() + 1e-3
