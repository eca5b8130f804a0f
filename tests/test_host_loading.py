"""Loading, replacing and unloading adapters of a live model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiny
from moegraft import ReadOptions
from moegraft.errors import AdapterError
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_bit_equal
from test_host_lifecycle import A, B, C, assert_generates, at_step, sequences_of
from tiny_grafts import generate, load_cases, new_graft, prompts

FULL = "peft/0.21.2/qwen3_moe/modules_to_save"


@pytest.fixture
def graft() -> Iterator[Graft]:
    """A fresh graft with two adapters on two slots."""
    graft = new_graft("qwen3_moe", max_adapters=2)
    load_cases(graft, [A, B])
    yield graft
    graft.detach()


def test_a_failed_load_keeps_the_old_version_serving(graft: Graft, tmp_path: Path) -> None:
    before = graft.store.info(A)
    broken = tmp_path / "adapter_model.safetensors"
    broken.write_bytes(b"nothing")
    nan = {key: tensor * float("nan") for key, tensor in tiny.tensors_of(A).items()}
    for attempt in (
        lambda: graft.load(A, tmp_path),
        lambda: graft.load(A, tiny.folder(FULL)),
        lambda: graft.load(A, tmp_path / "nowhere"),
        lambda: graft.load_tensors(A, nan, tiny.config_of(A)),
        lambda: graft.load_tensors(A, {}, {}),
        lambda: graft.load_tensors(A, tiny.tensors_of(A), {"peft_type": "IA3"}),
    ):
        with pytest.raises(AdapterError):
            attempt()
        assert graft.store.info(A) == before
    assert_generates(graft, [A, None], [A, None])


def test_an_adapter_over_the_maximum_rank_is_refused_and_nothing_is_loaded() -> None:
    graft = new_graft("qwen3_moe", max_rank=3)
    graft.load(A, tiny.folder(A))
    with pytest.raises(AdapterError, match="has rank 6, over the bank's maximum of 3"):
        graft.load(B, tiny.folder(B))
    assert [info.name for info in graft.adapters] == [A]
    graft.detach()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300, "a\0b", 3, None])
def test_a_name_that_is_no_label_is_refused(graft: Graft, name: Any) -> None:
    with pytest.raises(AdapterError, match="is not an adapter name"):
        graft.load(name, tiny.folder(A))
    assert len(graft.adapters) == 2


def test_a_name_that_looks_like_a_path_is_only_a_label(graft: Graft) -> None:
    for name in ("/etc/passwd", "../x", "a/../../x"):
        graft.load(name, tiny.folder(A))
        assert_generates(graft, [name, None], [A, None])
        graft.unload(name)


def test_a_reload_under_the_same_name_serves_the_new_content_next(graft: Graft) -> None:
    first = graft.load("x", tiny.folder(A))
    assert_generates(graft, ["x", None], [A, None])
    second = graft.load("x", tiny.folder(B))
    assert second.version > first.version and second.checksum != first.checksum
    assert_generates(graft, ["x", None], [B, None])
    third = graft.load("x", tiny.folder(A))
    assert third.version > second.version and third.checksum == first.checksum
    assert_generates(graft, ["x", None], [A, None])


def test_live_tensors_serve_what_they_were_when_loaded(graft: Graft) -> None:
    live = {key: nn.Parameter(tensor.clone()) for key, tensor in tiny.tensors_of(A).items()}
    info = graft.load_tensors("live", live, tiny.config_of(A))
    assert info.checksum == graft.store.info(A).checksum
    with torch.no_grad():
        for parameter in live.values():
            parameter.mul_(7)
    assert_generates(graft, ["live", None], [A, None])
    graft.load_tensors("live", live, tiny.config_of(A))
    assert graft.store.info("live").checksum != info.checksum


def test_an_adapter_file_may_go_away_once_it_is_loaded(graft: Graft, tmp_path: Path) -> None:
    save_file(tiny.tensors_of(C), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        (tiny.folder(C) / "adapter_config.json").read_text()
    )
    graft.load("gone", tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert_generates(graft, ["gone", None], [C, None])
    assert_generates(graft, [A, B], [A, B])  # evicts it
    assert_generates(graft, ["gone", None], [C, None])


@pytest.mark.parametrize("options", [{}, {"max_adapters": 1}, {"arena_bytes": 40_000}])
def test_more_adapters_than_slots_take_turns(options: dict[str, Any]) -> None:
    graft = new_graft("qwen3_moe", **{"max_adapters": 2, **options})
    load_cases(graft, [A, B, C])
    for case in (A, B, C, B, A):
        assert_generates(graft, [case, None], [case, None])
    assert sum(info.slot is not None for info in graft.adapters) <= 2
    graft.detach()


def test_a_running_batch_keeps_an_adapter_that_is_unloaded(graft: Graft) -> None:
    rows, inputs = [A, None, B], prompts(3)
    stop = at_step(2, lambda: graft.unload(A))
    found = generate(graft, inputs, adapters=rows, stopping_criteria=stop).sequences
    for row, case in enumerate(rows):
        assert torch.equal(found[row], sequences_of(case, inputs, row))
    with pytest.raises(AdapterError, match="There is no adapter"):
        graft.forward(**inputs, adapters=rows)
    used = graft.bank.memory.used
    assert used == graft.store.info(B).num_bytes


def test_a_running_batch_keeps_the_version_that_it_started_with(graft: Graft) -> None:
    rows, inputs = [A, None], prompts(2)
    stop = at_step(2, lambda: void(graft.load(A, tiny.folder(C))))
    found = generate(graft, inputs, adapters=rows, stopping_criteria=stop).sequences
    for row, case in enumerate(rows):
        assert torch.equal(found[row], sequences_of(case, inputs, row))
    assert_generates(graft, [A, None], [C, None])


def void(_: object) -> None:
    """Drop a result."""


def test_a_slot_in_use_is_never_given_to_another_adapter() -> None:
    graft = new_graft("qwen3_moe", max_adapters=1)
    load_cases(graft, [A, B])
    inputs, errors = prompts(2), []

    def intrude() -> None:
        graft.unload(A)
        with pytest.raises(AdapterError, match="only 0 of 1 are free or evictable") as caught:
            graft.forward(**inputs, adapters=B)
        errors.append(caught.value)

    stop = at_step(3, intrude)
    found = generate(graft, inputs, adapters=[None, A], stopping_criteria=stop).sequences
    assert torch.equal(found[1], sequences_of(A, inputs, 1)) and errors
    assert_generates(graft, [B, None], [B, None])
    graft.detach()


def test_a_second_thread_may_unload_and_load_while_a_batch_runs(graft: Graft) -> None:
    inputs = prompts(2)
    expected = sequences_of(A, inputs, 0)
    done = threading.Event()
    failures: list[str] = []

    def churn() -> None:
        turn = 0
        while not done.is_set():
            graft.load("other", tiny.folder((B, C)[turn % 2]))
            graft.unload("other")
            turn += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(4):
            found = generate(graft, inputs, adapters=[A, None]).sequences
            if not torch.equal(found[0], expected):
                failures.append("wrong tokens")
    finally:
        done.set()
        thread.join()
    assert not failures
    assert {info.name for info in graft.adapters} == {A, B}


def test_a_hundred_reloads_leak_no_slot_and_serve_the_newest(graft: Graft) -> None:
    inputs = prompts(2)
    tensors = tiny.tensors_of(A)
    for step in range(100):
        factor = 1 + step % 5
        changed = {k: t * factor if "lora_B" in k else t for k, t in tensors.items()}
        graft.load_tensors("step", changed, tiny.config_of(A))
        found = graft.forward(**inputs, adapters=["step", None]).logits
        same = graft.load_tensors("same", tensors, tiny.config_of(A, lora_alpha=6 * factor))
        expected = graft.forward(**inputs, adapters=["same", None]).logits
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), step
        assert same.version == graft.store.info("step").version + 1
    resident = [info for info in graft.adapters if info.slot is not None]
    assert len(resident) == 2
    assert graft.bank.memory.used == sum(info.num_bytes for info in resident)


def test_unloading_everything_gives_all_memory_back(graft: Graft) -> None:
    generate(graft, prompts(2), adapters=[A, B])
    assert graft.bank.memory.used > 0
    for info in graft.adapters:
        graft.unload(info.name)
    assert graft.bank.memory.used == 0
    with pytest.raises(AdapterError, match="loaded: none"):
        graft.unload(A)


def test_a_pinned_adapter_stays_in_its_slot(graft: Graft) -> None:
    graft.load(C, tiny.folder(C))
    graft.forward(**prompts(1), adapters=A)
    graft.pin(A)
    slot = graft.store.info(A).slot
    for case in (B, C, B):
        graft.forward(**prompts(1), adapters=case)
        assert graft.store.info(A).slot == slot
    with pytest.raises(AdapterError, match="need a slot"):
        graft.forward(**prompts(2), adapters=[B, C])
    graft.pin(A, False)
    assert_generates(graft, [B, C], [B, C])


def test_check_reports_without_loading(graft: Graft) -> None:
    report = graft.check(tiny.folder(FULL))
    assert len(report.refused) == 1 and report.bound == 4
    excused = graft.check(tiny.folder(FULL), ReadOptions(skip=(r"layers\.0.*q_proj",)))
    assert len(excused.refused) == 1 and len(excused.skipped) == 2
    assert {info.name for info in graft.adapters} == {A, B}


def test_an_adapter_with_alpha_zero_is_the_base_model(graft: Graft) -> None:
    inputs = prompts(2)
    graft.load_tensors("zero", tiny.tensors_of(A), tiny.config_of(A, lora_alpha=0))
    base = graft.forward(**inputs).logits
    found = graft.forward(**inputs, adapters="zero").logits
    assert_bit_equal(found, base)
