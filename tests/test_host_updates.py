"""Updates of a live model's adapters, from tensors and flat buffers; and what they weigh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moegraft
import tiny
from moegraft import ReadOptions
from moegraft.adapters import make_source
from moegraft.errors import AdapterError, MoegraftError
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_bit_equal
from test_host_lifecycle import A, B, C, assert_generates, at_step, sequences_of
from tiny_grafts import generate, greedy, load_cases, new_graft, prompts, static_graft


@pytest.fixture
def graft() -> Iterator[Graft]:
    """A fresh graft with two adapters on two slots."""
    graft = new_graft("qwen3_moe", max_adapters=2)
    load_cases(graft, [A, B])
    yield graft
    graft.detach()


def changed(case: str, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """A case's tensors with every B times a factor."""
    return {k: t * factor if "lora_B" in k else t for k, t in tiny.tensors_of(case).items()}


def flat_of(
    tensors: dict[str, torch.Tensor], gap: int = 0
) -> tuple[torch.Tensor, dict[str, tuple[int, tuple[int, ...]]]]:
    """One buffer of all tensors and its index."""
    index, at = {}, gap
    for name, tensor in tensors.items():
        index[name] = (at, tuple(tensor.shape))
        at += tensor.numel() + gap
    buffer = torch.full((at,), math.nan, dtype=next(iter(tensors.values())).dtype)
    for name, (offset, shape) in index.items():
        buffer[offset : offset + math.prod(shape)] = tensors[name].flatten()
    return buffer, index


def test_an_update_is_served_by_the_next_batch_and_keeps_its_config(graft: Graft) -> None:
    config = tiny.config_of(A)
    graft.load_tensors("x", changed(A, 3), config)
    config["lora_alpha"] = 1000  # the caller's dict is his own
    graft.forward(**prompts(2), adapters=["x", None])
    slot, version = graft.store.info("x").slot, graft.store.info("x").version
    info = graft.update("x", tiny.tensors_of(A))
    assert info.slot == slot and info.version > version
    assert info.checksum == graft.store.info(A).checksum
    assert_generates(graft, ["x", None], [A, None])
    graft.update("x", tiny.tensors_of(A), tiny.config_of(A, lora_alpha=12))
    doubled = graft.forward(**prompts(2), adapters=["x", None]).logits
    graft.update("x", tiny.tensors_of(A))  # with the config of the last update
    assert_bit_equal(graft.forward(**prompts(2), adapters=["x", None]).logits, doubled)
    assert not torch.equal(graft.forward(**prompts(2), adapters=[A, None]).logits, doubled)


def test_a_loaded_folder_may_be_updated_with_the_options_of_its_load(graft: Graft) -> None:
    case = "peft/0.21.2/qwen3_moe/modules_to_save"
    graft.load("x", tiny.folder(case), ReadOptions(skip=("lm_head",)))
    checksum = graft.store.info("x").checksum
    assert graft.update("x", tiny.tensors_of(case)).checksum == checksum
    with pytest.raises(AdapterError, match="lm_head"):
        graft.update("x", tiny.tensors_of(case), options=ReadOptions())


def test_a_running_batch_keeps_the_version_that_an_update_replaces(graft: Graft) -> None:
    rows, inputs = [A, None], prompts(2)
    graft.load(A, tiny.folder(A))
    stop = at_step(2, lambda: graft.update(A, changed(A, 5)) and None)
    found = generate(graft, inputs, adapters=rows, stopping_criteria=stop).sequences
    for row, case in enumerate(rows):
        assert torch.equal(found[row], sequences_of(case, inputs, row))
    graft.load_tensors("five", changed(A, 5), tiny.config_of(A))
    new = graft.forward(**inputs, adapters=[A, None]).logits
    assert_bit_equal(graft.forward(**inputs, adapters=["five", None]).logits, new)


def test_a_decoder_serves_an_update_from_its_next_prompt_on() -> None:
    graft = static_graft(max_adapters=1)
    inputs = prompts(1)
    graft.load_tensors("five", changed(A, 5), tiny.config_of(A))
    old, new = greedy(graft, inputs, A, 6), greedy(graft, inputs, "five", 6)
    assert not torch.equal(old, new)
    decoder = graft.decoder(1, 13)
    decoder.prefill(inputs["input_ids"], A, inputs["attention_mask"])
    sites = graft.bank.sites_version
    graft.update(A, changed(A, 5))
    assert torch.equal(decoder.run(5), old)
    decoder.prefill(inputs["input_ids"], A, inputs["attention_mask"])
    assert torch.equal(decoder.run(5), new)
    assert graft.bank.sites_version == sites  # nothing to capture again
    graft.detach()


def test_an_update_while_a_decoder_reads_its_prompt_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graft, inputs = static_graft(max_adapters=2), prompts(1)
    old = greedy(graft, inputs, A, 6)
    decoder = graft.decoder(1, 13)
    reset = decoder._decode.reset

    def update_first() -> None:  # as another thread might
        graft.update(A, changed(A, 5))
        reset()

    monkeypatch.setattr(decoder._decode, "reset", update_first)
    decoder.prefill(inputs["input_ids"], A, inputs["attention_mask"])
    assert torch.equal(decoder.run(5), old)
    graft.detach()


def test_a_failed_update_keeps_the_old_version_serving(graft: Graft) -> None:
    graft.forward(**prompts(2), adapters=[A, B])
    before, memory = graft.store.info(A), graft.memory
    good = tiny.tensors_of(A)
    key = next(k for k in good if "q_proj" in k and "lora_A" in k)
    part = {k: t for k, t in good.items() if "q_proj" not in k}
    buffer, index = flat_of(good)
    config = tiny.config_of(A)
    for attempt, message in [
        (lambda: graft.update(A, {**good, key: good[key] * math.nan}), "NaN"),
        (lambda: graft.update(A, {**good, key: good[key][:, :-1].clone()}), "can't be served"),
        (lambda: graft.update(A, {**good, "x.lora_A.weight": torch.ones(2, 2)}), "x.lora_A"),
        (lambda: graft.update(A, {**good, key: good[key].double()}), "float64"),
        (lambda: graft.update(A, part), "leaves out factors.*q_proj"),
        (lambda: graft.update(A, {}), "none of its 0 tensors"),
        (lambda: graft.update(A, good, {**config, "peft_type": "IA3"}), "IA3"),
        (lambda: graft.update_flat(A, buffer[:-1], index), "of a buffer of"),
        (lambda: graft.update("x", good), "no adapter 'x'"),
        (lambda: graft.update_flat("x", buffer, index), "no adapter 'x'"),
    ]:
        with pytest.raises(AdapterError, match=message):
            attempt()
        assert graft.store.info(A) == before and graft.memory == memory
    assert_generates(graft, [A, B], [A, B])


def test_an_update_over_the_maximum_rank_keeps_the_old_version() -> None:
    graft = new_graft("qwen3_moe", max_rank=3)
    graft.load("x", tiny.folder(A))
    graft.forward(**prompts(1), adapters="x")
    before = graft.store.info("x")
    with pytest.raises(AdapterError, match="has rank 6, over the bank's maximum of 3"):
        graft.update("x", tiny.tensors_of(B), tiny.config_of(B))
    assert graft.store.info("x") == before
    assert_generates(graft, ["x", None], [A, None])
    graft.detach()
    with pytest.raises(MoegraftError, match="was detached"):
        graft.update("x", tiny.tensors_of(A))


@pytest.mark.parametrize("gap", [0, 3])
def test_a_flat_buffer_loads_and_updates_as_its_tensors_do(graft: Graft, gap: int) -> None:
    buffer, index = flat_of(changed(C), gap)
    graft.load(C, tiny.folder(C))
    info = graft.load_flat("flat", buffer, index, tiny.config_of(C))
    assert info.checksum == graft.store.info(C).checksum
    assert_generates(graft, ["flat", None], [C, None])
    buffer.mul_(2)  # the next step of training changes nothing that is served
    assert_generates(graft, ["flat", None], [C, None])
    graft.update_flat("flat", buffer, index)
    assert graft.store.info("flat").checksum != info.checksum
    bad = dict(index)
    first, second = list(bad)[:2]
    bad[second] = (bad[first][0], bad[second][1])
    with pytest.raises(AdapterError, match=r"flat buffer for 'flat'.*overlap"):
        graft.update_flat("flat", buffer, bad)


def test_a_hundred_updates_leak_nothing(graft: Graft) -> None:
    graft.load_tensors("policy", changed(A), tiny.config_of(A))
    buffer, index = flat_of(changed(A))
    for step in range(100):
        buffer.mul_(1.01)
        graft.update_flat("policy", buffer, index)
        if step % 10 == 0:
            graft.forward(**prompts(1), adapters="policy")
    resident = [info for info in graft.adapters if info.slot is not None]
    assert len(graft.adapters) == 3 and len(resident) == 1
    assert graft.memory.used == resident[0].num_bytes
    same = graft.load_tensors(
        "same",
        {k: buffer[o : o + math.prod(s)].view(s) for k, (o, s) in index.items()},
        tiny.config_of(A),
    )
    assert same.checksum == graft.store.info("policy").checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_an_estimate_is_what_the_adapter_takes(name: str, dtype: torch.dtype) -> None:
    graft = new_graft(name, dtype)
    for case in tiny.SERVED_CASES:
        if tiny.model_of(case) == name:
            estimate = graft.memory_estimate(tiny.folder(case))
            info = graft.load(case, tiny.folder(case))
            assert estimate.num_bytes == info.num_bytes == sum(estimate.kinds.values()) > 0
            parts = [n for projections in estimate.sites.values() for n in projections.values()]
            assert sum(parts) == estimate.num_bytes and min(parts) > 0
            assert set(estimate.kinds) == {site.kind for site in info.report.sites}
            before = graft.memory.used
            graft.forward(**prompts(1), adapters=case)
            assert graft.memory.used - before == estimate.num_bytes
            graft.unload(case)
    assert estimate.table_row * graft.bank.num_slots == graft.memory.table
    assert estimate.dtype == dtype
    graft.detach()


def test_an_estimate_loads_nothing_and_refuses_what_a_load_does(graft: Graft) -> None:
    memory, infos = graft.memory, graft.adapters
    source = make_source(tiny.tensors_of(A), tiny.config_of(A))
    assert graft.memory_estimate(source).num_bytes == graft.store.info(A).num_bytes
    experts = graft.memory_estimate(source, ReadOptions(skip=(r"^(?!.*\bexperts\b)",)))
    assert set(experts.kinds) == {"experts"}
    with pytest.raises(AdapterError, match="modules_to_save"):
        graft.memory_estimate(tiny.folder("peft/0.21.2/qwen3_moe/modules_to_save"))
    assert (graft.memory, graft.adapters) == (memory, infos)


def test_only_the_experts_of_an_adapter_may_be_loaded(graft: Graft) -> None:
    only: Any = moegraft.ReadOptions(skip=(r"^(?!.*\bexperts\b)",))
    report = graft.load("experts", tiny.folder(A), only).report
    assert {site.kind for site in report.sites} == {"experts"}
    assert report.bound + len(report.skipped) == report.total and report.skipped


@pytest.mark.parametrize("only", ["experts", ("down",), ("linear", "gate"), ("router", "experts")])
def test_only_the_parts_that_were_asked_for_are_kept_and_the_rest_is_reported(
    graft: Graft, only: Any
) -> None:
    options = moegraft.ReadOptions(only=only)
    parts = (only,) if isinstance(only, str) else only
    whole = graft.memory_estimate(tiny.folder(A))
    estimate = graft.memory_estimate(tiny.folder(A), options)
    info = graft.load("part", tiny.folder(A), options)
    report = info.report
    assert info.num_bytes == estimate.num_bytes < whole.num_bytes
    kind_of = {site.name: site.kind for site in graft.spec.sites}
    kept = {(site.site, p) for site in report.sites for p in site.projections}
    left = {(site, p) for site, names in report.left_out.items() for p in names}
    assert kept and left and not kept & left
    assert kept | left == {(s, p) for s, names in whole.sites.items() for p in names}
    for site, projection in kept | left:
        wanted = kind_of[site] in parts or projection in parts
        assert ((site, projection) in kept) == wanted
    assert report.bound == report.total and "left out at" in report.summary()
    assert report.to_dict()["left_out"] == dict(report.left_out)
    served = graft.forward(**prompts(1), adapters="part").logits
    assert not torch.equal(served, graft.forward(**prompts(1), adapters=A).logits)
    again = graft.update("part", tiny.tensors_of(A))  # reads as the load did
    assert again.checksum == info.checksum


def test_parts_that_are_none_and_parts_that_leave_nothing_are_refused(graft: Graft) -> None:
    with pytest.raises(AdapterError, match="only='attention' is no part of a model: experts"):
        moegraft.ReadOptions(only=("attention",))
    with pytest.raises(AdapterError, match="only=3 is no part"):
        moegraft.ReadOptions(only=3)  # type: ignore[arg-type]
    experts = {k: t for k, t in tiny.tensors_of(A).items() if ".experts." in k}
    options = moegraft.ReadOptions(only=("linear",))
    with pytest.raises(AdapterError, match="nothing of it is left"):
        graft.load_tensors("x", experts, tiny.config_of(A), options)
    assert "x" not in graft.store
