"""Kinds of fault in slots, loads and unloads of a running server; see ``docs/field-faults.md``."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import tiny
from audit import adapter_files, what_happens
from moegraft.errors import AdapterError
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_bit_equal
from start_threads import start_all
from test_host_lifecycle import A, B, C, assert_generates, at_step
from tiny_grafts import generate, load_cases, new_graft, prompts


@pytest.fixture
def graft() -> Iterator[Graft]:
    """A fresh graft with two slots."""
    graft = new_graft("qwen3_moe", max_adapters=2)
    yield graft
    graft.detach()


def test_a_replaced_adapter_is_read_once_not_at_every_step(graft: Graft, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.folder(A), folder)
    graft.load("x", folder)
    with what_happens() as events:
        graft.load("x", folder)
        generate(graft, prompts(2), adapters=["x", None], max_new_tokens=10)
        graft.forward(**prompts(2), adapters="x")
    assert adapter_files(events) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_is_aborted_around_an_unload_leaks_nothing(graft: Graft, when: str) -> None:
    load_cases(graft, [A, B])

    def act() -> None:
        if when == "before":
            graft.unload(A)
        raise KeyboardInterrupt

    for _ in range(3):
        graft.load(A, tiny.folder(A))
        with suppress(KeyboardInterrupt):
            generate(graft, prompts(2), adapters=[A, B], stopping_criteria=at_step(2, act))
        if when == "after":
            graft.unload(A)
        assert [info.name for info in graft.adapters] == [B]
        assert graft.bank.memory.used == graft.store.info(B).num_bytes
    graft.load(C, tiny.folder(C))
    assert_generates(graft, [B, C], [B, C])


def test_of_two_services_that_load_one_name_one_gets_it(graft: Graft) -> None:
    start, got, refused = threading.Barrier(8), [], []

    def serve(case: str) -> None:
        start.wait()
        try:
            got.append((case, graft.load("tenant", tiny.folder(case), replace=False)))
        except AdapterError as error:
            assert "There is an adapter 'tenant' already (version 1)" in str(error)
            refused.append(case)

    threads = [threading.Thread(target=serve, args=((A, B)[i % 2],)) for i in range(8)]
    start_all(threads)
    for thread in threads:
        thread.join(60)
    assert len(got) == 1 and len(refused) == 7
    case, info = got[0]
    assert graft.store.info("tenant").checksum == info.checksum
    assert_generates(graft, ["tenant", None], [case, None])
    tensors, config = tiny.tensors_of(C), tiny.config_of(C)
    with pytest.raises(AdapterError, match=r"load with replace=True"):
        graft.load_tensors("tenant", tensors, config, replace=False)
    graft.unload("tenant")
    graft.load_tensors("tenant", tensors, config, replace=False)
    assert_generates(graft, ["tenant", None], [C, None])


def test_one_slot_rotates_four_names_and_a_reload_really_replaces() -> None:
    graft, cases = new_graft("qwen3_moe", max_adapters=1), [A, B, C, f"{A}"]
    names = ["w", "x", "y", "z"]
    for name, case in zip(names, cases, strict=True):
        graft.load(name, tiny.folder(case))
    for turn in range(2):
        for name, case in zip(names, cases, strict=True):
            assert_generates(graft, [name, None], [case, None])
            slots = {info.name: info.slot for info in graft.adapters if info.slot is not None}
            assert slots == {name: 0}, "registered is not resident"
        graft.load("w", tiny.folder(C if turn == 0 else B))
        cases[0] = C if turn == 0 else B
    assert_generates(graft, ["w", None], [B, None])
    graft.detach()


def test_batches_with_too_many_adapters_are_refused_among_aborts_and_the_rest_is_served(
    graft: Graft,
) -> None:
    load_cases(graft, [A, B, C])

    def abort() -> None:
        raise KeyboardInterrupt

    wanted = graft.forward(**prompts(2), adapters=[A, None]).logits
    for step in range(1, 4):
        with suppress(KeyboardInterrupt):
            generate(
                graft, prompts(3), adapters=[A, B, None], stopping_criteria=at_step(step, abort)
            )
        with pytest.raises(AdapterError, match=r"uses 3 different adapters .* has 2 slots"):
            generate(graft, prompts(4), adapters=[A, B, C, None])
        assert_bit_equal(graft.forward(**prompts(2), adapters=[A, None]).logits, wanted)
    assert_generates(graft, [B, C, None], [B, C, None])


def test_an_adapter_of_tensors_is_served_again_after_its_eviction(graft: Graft) -> None:
    tensors = {key: tensor.clone() for key, tensor in tiny.tensors_of(C).items()}
    graft.load_tensors("live", tensors, tiny.config_of(C))
    assert_generates(graft, ["live", None], [C, None])
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    del tensors
    load_cases(graft, [A, B])
    assert_generates(graft, [A, B], [A, B])
    assert graft.store.info("live").slot is None
    with what_happens() as events:
        assert_generates(graft, ["live", None], [C, None])
    assert adapter_files(events) == []


def test_unload_and_reload_at_every_step_keep_slots_and_serve_each_steps_values(
    graft: Graft,
) -> None:
    tensors, config = tiny.tensors_of(A), tiny.config_of(A)
    inputs = prompts(1)
    for step in range(100):
        factor = 1.0 + step / 50
        changed = {k: t * factor if "lora_B" in k else t for k, t in tensors.items()}
        graft.load_tensors("policy", changed, config)
        found = graft.forward(**inputs, adapters="policy").logits
        graft.unload("policy")
        assert graft.bank.memory.used == 0 and graft.adapters == ()
        if step % 25 == 0:
            graft.load_tensors("other", changed, config)
            assert_bit_equal(graft.forward(**inputs, adapters="other").logits, found)
            graft.unload("other")
