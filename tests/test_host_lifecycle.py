"""Attach, load, reload, unload, detach: nothing is left behind, nothing running is disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, StoppingCriteriaList

import moegraft
import tiny
from moegraft.errors import AdapterError, MoegraftError, UnsupportedError
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_bit_equal, assert_close
from start_threads import start_all
from tiny_grafts import generate, load_cases, model_for, new_graft, prompts, row_of

QWEN = "peft/0.21.2/qwen3_moe/"
A, B, C = f"{QWEN}experts", f"{QWEN}all_linear", f"{QWEN}router"
STEPS = 6


@pytest.fixture
def graft() -> Iterator[Graft]:
    """A fresh graft with three adapters on two slots."""
    graft = new_graft("qwen3_moe", max_adapters=2)
    load_cases(graft, [A, B, C])
    yield graft
    graft.detach()


def sequences_of(case: str | None, inputs: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """What a row must generate."""
    found = generate(model_for(case, "qwen3_moe"), row_of(inputs, row)).sequences[0]
    assert isinstance(found, torch.Tensor)
    return found


def assert_generates(graft: Graft, rows: list[str | None], cases: list[str | None]) -> None:
    """Rows named ``rows`` give what the merged models of ``cases`` give."""
    inputs = prompts(len(rows))
    found = generate(graft, inputs, adapters=rows).sequences
    for row, case in enumerate(cases):
        assert torch.equal(found[row], sequences_of(case, inputs, row)), (row, case)


def hooks_of(model: nn.Module) -> list[tuple[int, ...]]:
    """Numbers of hooks of every module."""
    names = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [tuple(len(getattr(m, name)) for name in names) for m in model.modules()]


def at_step(step: int, action: Callable[[], None]) -> StoppingCriteriaList:
    """A stopping criterion that never stops, and acts once after some steps."""
    seen: list[int] = []

    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        seen.append(1)
        if len(seen) == step:
            action()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return StoppingCriteriaList([criterion])


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_detach_restores_the_model_exactly(name: str, implementation: str) -> None:
    model, inputs = tiny.new_model(name), prompts(2)
    model.set_experts_implementation(implementation)
    parameters = dict(model.named_parameters())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    hooks, config = hooks_of(model), model.config.to_dict()
    before = generate(model, inputs)
    for _ in range(2):
        graft = moegraft.attach(model)
        case = f"peft/0.21.2/{name}/experts"
        graft.load("x", tiny.folder(case))
        assert not torch.equal(
            graft.forward(**inputs, adapters="x").logits, graft.forward(**inputs).logits
        )
        graft.detach()
        graft.detach()
        assert all(model.get_parameter(key) is p for key, p in parameters.items())
        assert list(model.state_dict()) == list(state)
        for key, value in model.state_dict().items():
            assert_bit_equal(value, state[key], key)
        assert hooks_of(model) == hooks
        assert {path: set(vars(m)) for path, m in model.named_modules()} == attributes
        assert model.config.to_dict() == config
        assert model.get_experts_implementation() == {"": implementation}
        after = generate(model, inputs)
        assert torch.equal(after.sequences, before.sequences)
        assert_bit_equal(torch.stack(after.logits), torch.stack(before.logits))
        assert not graft.adapters


def test_the_weights_are_never_changed_or_copied_while_attached(graft: Graft) -> None:
    base = tiny.base_model("qwen3_moe").state_dict()
    assert_generates(graft, [A, None, B], [A, None, B])
    assert list(graft.model.state_dict()) == list(base)
    for key, value in graft.model.state_dict().items():
        assert_bit_equal(value, base[key], key)
    for path, layer in graft.layers.items():
        module = graft.model.get_submodule(path)
        assert layer.weights.gate_up.data_ptr() == module.gate_up_proj.data_ptr()
        assert layer.weights.down.data_ptr() == module.down_proj.data_ptr()


def test_a_model_saved_while_attached_loads_without_moegraft(graft: Graft, tmp_path: Path) -> None:
    graft.model.save_pretrained(tmp_path)
    assert "moegraft" not in (tmp_path / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    inputs = prompts(2)
    expected = generate(tiny.base_model("qwen3_moe"), inputs)
    assert torch.equal(generate(model, inputs).sequences, expected.sequences)


def test_attaching_twice_is_refused(graft: Graft) -> None:
    hooks = hooks_of(graft.model)
    with pytest.raises(UnsupportedError, match="already attached"):
        moegraft.attach(graft.model)
    assert hooks_of(graft.model) == hooks
    assert_generates(graft, [A, None], [A, None])


@pytest.mark.parametrize("model", [nn.Linear(2, 2), object(), None])
def test_what_is_no_transformers_model_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="no experts interface"):
        moegraft.attach(model)


@pytest.mark.parametrize(
    "options", [{"max_adapters": 0}, {"max_rank": 0}, {"backend": "abacus"}, {"arena_bytes": -1}]
)
def test_a_refused_attach_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    model = tiny.new_model("qwen3_moe")
    hooks, implementation = hooks_of(model), model.get_experts_implementation()
    with pytest.raises(MoegraftError):
        moegraft.attach(model, **options)
    assert hooks_of(model) == hooks
    assert model.get_experts_implementation() == implementation
    moegraft.attach(model).detach()


def test_a_dtype_that_is_not_served_is_refused() -> None:
    model = tiny.new_model("qwen3_moe").double()
    with pytest.raises(MoegraftError, match="float64"):
        moegraft.attach(model)


def test_a_detached_graft_says_so() -> None:
    graft = new_graft("qwen3_moe")
    graft.detach()
    again = moegraft.attach(graft.model)
    for use in (
        lambda: graft.load("x", tiny.folder(A)),
        lambda: graft.load_tensors("x", tiny.tensors_of(A), tiny.config_of(A)),
        lambda: graft.forward(**prompts(1)),
        lambda: graft.generate(**prompts(1), max_new_tokens=1),
    ):
        with pytest.raises(MoegraftError, match="This graft was detached"):
            use()
    assert len(again.adapters) == 0
    again.detach()


def test_a_model_that_only_names_the_implementation_says_it_is_not_attached() -> None:
    new_graft("qwen3_moe").detach()  # registers the implementation
    model = tiny.new_model("qwen3_moe")
    model.set_experts_implementation("moegraft")
    with pytest.raises(MoegraftError, match=r"not attached: call moegraft\.attach"):
        model(**prompts(1))


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([A, "nobody"], "There is no adapter 'nobody'; loaded: "),
        ("nobody", "There is no adapter 'nobody'"),
        ([A], "2 rows but 1 adapters"),
        ([A, None, B], "2 rows but 3 adapters"),
        ([], "2 rows but 0 adapters"),
    ],
)
def test_a_batch_that_cannot_run_changes_nothing(graft: Graft, adapters: Any, message: str) -> None:
    generate(graft, prompts(2), adapters=[A, None])
    before = graft.adapters
    for call in (graft.forward, graft.generate):
        with pytest.raises(AdapterError, match=message):
            call(**prompts(2), adapters=adapters)
    assert graft.adapters == before
    assert_generates(graft, [A, None], [A, None])


def test_more_adapters_than_slots_in_one_batch_are_refused(graft: Graft) -> None:
    before = graft.adapters
    with pytest.raises(AdapterError, match=r"3 different adapters .* has 2 slots"):
        graft.forward(**prompts(3), adapters=[A, B, C])
    assert graft.adapters == before
    assert_generates(graft, [A, B, None, A], [A, B, None, A])
    assert_generates(graft, [C, B], [C, B])


def test_a_call_without_inputs_is_refused(graft: Graft) -> None:
    for call in (graft.forward, graft.generate):
        with pytest.raises(AdapterError, match="Pass input_ids"):
            call(adapters=A)
        with pytest.raises(AdapterError, match="Pass input_ids"):
            call(None, adapters=A)


def test_a_forward_that_fails_leaves_no_adapter_behind(graft: Graft) -> None:
    inputs = prompts(2)
    base = graft.forward(**inputs).logits
    with pytest.raises(IndexError):
        graft.forward(input_ids=torch.full((2, 3), 10_000), adapters=[A, B])
    assert_bit_equal(graft.forward(**inputs).logits, base)
    assert_bit_equal(graft.model(**inputs).logits.detach(), base)
    graft.unload(A)
    assert {info.slot for info in graft.adapters if info.name != B} == {None}


def test_a_forward_with_gradients_warns(graft: Graft, caplog: pytest.LogCaptureFixture) -> None:
    from moegraft.hosts.transformers import experts

    experts._warn_no_gradients.cache_clear()
    graft.forward(**prompts(1), adapters=A)
    assert not caplog.records
    for _ in range(2):
        graft.model(**prompts(1))
    assert [r.message for r in caplog.records if "moegraft is for inference" in r.message]
    assert len(caplog.records) == 1


def test_two_threads_with_different_adapters_each_get_their_own_rows(graft: Graft) -> None:
    inputs = prompts(2)
    jobs: list[list[str | None]] = [[A, None], [None, B]]
    expected = [torch.stack([sequences_of(c, inputs, i) for i, c in enumerate(j)]) for j in jobs]
    wrong: list[str] = []
    start = threading.Barrier(len(jobs))

    def work(job: int) -> None:
        start.wait()
        for _ in range(4):
            found = generate(graft, inputs, adapters=jobs[job]).sequences
            if not torch.equal(found, expected[job]):
                wrong.append(f"thread {job}")

    threads = [threading.Thread(target=work, args=(job,)) for job in range(len(jobs))]
    start_all(threads)
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_apply_to_their_own_thread_only(graft: Graft) -> None:
    inputs = prompts(2)
    base = graft.forward(**inputs).logits
    found: list[torch.Tensor] = []
    with graft.rows(A, 2), torch.no_grad():
        thread = threading.Thread(target=lambda: found.append(graft.model(**inputs).logits))
        thread.start()
        thread.join()
        changed = graft.model(**inputs).logits
    assert_bit_equal(found[0].detach(), base)
    expected = graft.forward(**inputs, adapters=A).logits
    assert_close(changed, expected, torch.float32)
