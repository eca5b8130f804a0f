"""DoRA and biases of lora_B on linears: served, merged and converted as PEFT means them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
from moegraft.adapters import (
    AdapterBank,
    ModelSpec,
    ReadOptions,
    bind,
    check_bound,
    make_source,
    read_adapter,
)
from moegraft.adapters.convert import convert
from moegraft.adapters.dora import with_weights
from moegraft.adapters.merge import merge
from moegraft.errors import AdapterError
from moegraft.hosts.transformers import Graft
from moegraft.hosts.transformers.row_vectors import RowVectors
from moegraft.linear import LinearLora
from moegraft.packing import pack_adapter
from moegraft.sites import linear_site
from moegraft.testing import assert_bit_equal, assert_close, assert_delta_close, relative_error
from moegraft.types import TokenSlots
from tiny import EXPERTS, VECTOR_CASES
from tiny_grafts import model_for, new_graft, prompts, row_of

DORA, BIAS, GPT_BIAS = VECTOR_CASES
QWEN = "qwen3_moe"
TOLERANCE = 1e-5
_FOUND = {DORA: "DoRA magnitudes on 4 linears", BIAS: "biases of lora_B on 2 linears"}
FUSE = pytest.mark.parametrize("fuse", [False, True])


def loaded(case: str, **options: Any) -> Graft:
    """A model with one case loaded."""
    graft = new_graft(tiny.model_of(case), **options)
    graft.load(case, tiny.folder(case))
    return graft


def logits_of_oracle(graft: Graft, case: str, name: str | None = None) -> torch.Tensor:
    """The logits on the oracle's input, of its real tokens."""
    inputs = {key: tiny.oracle_of(case)[key] for key in ("input_ids", "attention_mask")}
    return graft.forward(**inputs, adapters=name or case).logits[inputs["attention_mask"].bool()]


def oracle_logits(case: str) -> torch.Tensor:
    """PEFT's own logits of the same tokens."""
    oracle = tiny.oracle_of(case)
    return oracle["logits"][oracle["attention_mask"].bool()]


@FUSE
@pytest.mark.parametrize("case", VECTOR_CASES)
def test_logits_equal_pefts_own(case: str, fuse: bool) -> None:
    graft = loaded(case, fuse_linears=fuse)
    assert_close(logits_of_oracle(graft, case), oracle_logits(case), torch.float32)
    info = graft.store.info(case)
    assert info.report.bound == info.report.total == len(tiny.tensors_of(case))
    assert info.report.layouts["linear_vectors"] == _FOUND.get(case, _FOUND[BIAS])
    assert graft.memory_estimate(tiny.folder(case)).num_bytes == info.num_bytes
    kind = "dora" if case == DORA else "lora_bias"
    assert {site.vectors for site in info.report.sites} == {(kind,)}


@FUSE
def test_rows_of_all_kinds_in_one_batch_each_get_their_own(fuse: bool) -> None:
    rows = [DORA, None, BIAS, EXPERTS, DORA, None]
    graft = new_graft(QWEN, fuse_linears=fuse)
    for case in (DORA, BIAS, EXPERTS):
        graft.load(case, tiny.folder(case))
    inputs = prompts(len(rows))
    found = graft.forward(**inputs, adapters=rows).logits
    base = graft.forward(**inputs, adapters=None).logits
    for row, case in enumerate(rows):
        mask = inputs["attention_mask"][row].bool()
        with torch.no_grad():
            expected = model_for(case, QWEN)(**row_of(inputs, row)).logits[0]
        assert_close(found[row][mask], expected[mask], torch.float32)
        if case is None:
            assert_bit_equal(found[row][mask], base[row][mask])


Q = linear_site("q", 24, 16)


class OneLinear:
    """A linear with a DoRA adapter in slot 0 and one with a bias of lora_B in slot 1."""

    def __init__(self, dtype: torch.dtype, base_bias: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.module = nn.Linear(24, 16, bias=base_bias, dtype=dtype).requires_grad_(False)
        self.module.weight.copy_(draw(16, 24))
        if base_bias:
            self.module.bias.copy_(3 * draw(16))
        self.a, self.b = 0.2 * draw(3, 24), 0.2 * draw(16, 3)
        self.magnitude, self.bias = draw(16).abs() + 3, draw(16)
        spec = ModelSpec((Q,), serves_vectors=True)
        self.bank = AdapterBank(spec.table_sites, num_slots=2, max_rank=4, dtype=dtype)
        pair = {"q.lora_A.weight": self.a, "q.lora_B.weight": self.b}
        for slot, vector in enumerate(
            ({"q.lora_magnitude_vector": self.magnitude}, {"q.lora_B.bias": self.bias})
        ):
            source = make_source({**pair, **vector}, {"r": 3, "lora_alpha": 6})
            bound = with_weights(bind(source, spec), lambda name: self.module.weight)
            packed = pack_adapter(bound.factors, self.bank.layout, dtype)
            self.bank.write(slot, f"slot {slot}", packed)
        linears = {name: self._lora(name) for name in ("q", "q:dora", "q:lora_bias")}
        self._main = linears["q"]
        self._vectors = RowVectors(self.module, linears["q:dora"], linears["q:lora_bias"])

    def _lora(self, name: str) -> LinearLora:
        return LinearLora(self.bank.site_table(name), self.bank.dtype, torch.device("cpu"))

    def run(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """The base product with everything that the rows' adapters have."""
        rows, tokens = self.module(x), TokenSlots.of(slots)
        self._vectors.apply(rows, tokens)
        self._main.add_to(rows, x, tokens)
        return rows

    def expected(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        """The same of one slot for all rows, in fp64."""
        weight = self.module.weight.double() + (2 * self.b.double() @ self.a.double())
        if slot == 0:
            weight = weight * (self.magnitude.double() / weight.norm(dim=1))[:, None]
        out = x.double() @ weight.T
        if self.module.bias is not None:
            out = out + self.module.bias.double()
        return out + 2 * self.bias.double() if slot == 1 else out


@pytest.mark.parametrize("base_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_row_of_a_linear_gets_its_own_vectors(dtype: torch.dtype, base_bias: bool) -> None:
    linear = OneLinear(dtype, base_bias)
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    slots = [t % 3 - 1 for t in range(40)]
    base, found = linear.module(x), linear.run(x, slots)
    for slot in (0, 1):
        mine = torch.tensor(slots) == slot
        expected = linear.expected(x[mine], slot)
        assert_close(found[mine], expected, dtype)
        assert_delta_close(found[mine], base[mine], expected, base[mine].double())
    idle = torch.tensor(slots) < 0
    assert_bit_equal(found[idle], base[idle])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_an_adapter_keep_nan_infinity_and_the_sign_of_zero(dtype: torch.dtype) -> None:
    linear = OneLinear(dtype, base_bias=False)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0], x[1], x[2] = torch.inf, torch.nan, -0.0
    base, found = linear.module(x), linear.run(x, [-1, -1, -1, 0, 1])
    assert_bit_equal(found[:3], base[:3])
    assert_close(found[3:4], linear.expected(x[3:4], 0), dtype)
    assert_close(found[4:], linear.expected(x[4:], 1), dtype)


@pytest.mark.parametrize("slots", [[], [-1, -1], [0], [1], [0, 0]])
def test_few_rows_and_none(slots: list[int]) -> None:
    linear = OneLinear(torch.float32, base_bias=True)
    x = torch.randn(len(slots), 24, generator=torch.Generator().manual_seed(1))
    found = linear.run(x, slots)
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert_close(found[row], linear.expected(x[row], slot), torch.float32)
        else:
            assert_bit_equal(found[row], linear.module(x)[row])


def test_update_and_unload_follow_the_vectors() -> None:
    graft = loaded(DORA)
    tensors = tiny.tensors_of(DORA)
    changed = {k: 1.5 * t if "magnitude" in k else t for k, t in tensors.items()}
    before = logits_of_oracle(graft, DORA)
    graft.update(DORA, changed)
    assert relative_error(logits_of_oracle(graft, DORA), before) > 0.01
    graft.update(DORA, tensors)
    assert_bit_equal(logits_of_oracle(graft, DORA), before)
    factors = {k: t for k, t in tensors.items() if "magnitude" not in k}
    with pytest.raises(AdapterError, match=r"q_proj \(dora: 0 of 1\)"):
        graft.update(DORA, factors)
    graft.unload(DORA)
    assert graft.memory.used == 0


def refused(case: str, tensors: dict[str, torch.Tensor]) -> str:
    """The reason why tensors of a case can't be bound."""
    spec = tiny.spec_of(tiny.model_of(case))
    with pytest.raises(AdapterError) as caught:
        check_bound(bind(make_source(tensors, tiny.config_of(case)), spec).report, spec)
    return str(caught.value)


def test_vectors_that_fit_nothing_are_refused_by_name() -> None:
    for case, leaf in ((DORA, "lora_magnitude_vector"), (BIAS, "lora_B.bias")):
        tensors = tiny.tensors_of(case)
        key = f"base_model.model.model.layers.1.self_attn.q_proj.{leaf}"
        assert "its shape (15,) is not [16]" in refused(case, {**tensors, key: torch.ones(15)})
        factors = {k: t for k, t in tensors.items() if ".layers.1" not in k or "q_proj" not in k}
        lost = refused(case, {**factors, key: torch.ones(16)})
        assert key in lost and "lora_A and lora_B, are missing or left out" in lost
    both = {**tiny.tensors_of(DORA), key: torch.ones(16)}
    assert "a second bias or magnitude" in refused(DORA, both)
    router = "base_model.model.model.layers.0.mlp.gate.lora_B.bias"
    assert "not served there" in refused(BIAS, {**tiny.tensors_of(BIAS), router: torch.ones(4)})


def test_a_weight_without_length_can_not_have_a_magnitude() -> None:
    graft = new_graft(QWEN)
    with torch.no_grad():
        graft.model.model.layers[0].self_attn.q_proj.weight[3] = 0
    tensors = dict(tiny.tensors_of(DORA))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors[key] = tensors[key].clone()
    tensors[key][3] = 0
    with pytest.raises(AdapterError, match="q_proj: DoRA's magnitude can't be applied, for 1 rows"):
        graft.load_tensors("d", tensors, tiny.config_of(DORA))
    assert graft.adapters == ()


def test_magnitudes_are_not_stored_without_the_weights_that_they_need() -> None:
    graft = new_graft(QWEN)
    with pytest.raises(AdapterError, match=r"'d' has DoRA on model.*, which needs the base"):
        graft.store.add("d", tiny.bound_case(DORA))


def test_a_bias_may_be_left_out_by_name() -> None:
    graft = new_graft(QWEN)
    report = graft.load("b", tiny.folder(BIAS), ReadOptions(skip=(r"lora_B\.bias",))).report
    assert len(report.skipped) == 2 and {site.vectors for site in report.sites} == {()}


def merged_folder(case: str, out: Path) -> Path:
    """Merge a case into its model."""
    model = tiny.model_of(case)
    merge(tiny.FIXTURES / "models" / model, tiny.bound_case(case), tiny.spec_of(model), out)
    return out


@pytest.mark.parametrize("case", [DORA, GPT_BIAS])
def test_a_merged_checkpoint_has_pefts_weights(case: str, tmp_path: Path) -> None:
    folder = merged_folder(case, tmp_path / "out")
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    expected = tiny.merged_parameters(case)
    for key, value in state.items():
        wanted = expected.get(key, tiny.base_model(tiny.model_of(case)).state_dict()[key])
        assert relative_error(value, wanted) <= TOLERANCE, key


def test_a_bias_that_the_model_has_no_place_for_is_served_but_not_merged(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"bias of lora_B for .*q_proj.* not merged"):
        merged_folder(BIAS, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", VECTOR_CASES)
def test_converted_files_keep_the_vectors_and_peft_loads_them(case: str, tmp_path: Path) -> None:
    model = tiny.model_of(case)
    found = convert(read_adapter(tiny.folder(case)), tiny.spec_of(model), "peft")
    for key, tensor in tiny.tensors_of(case).items():
        assert_bit_equal(found.tensors[key], tensor, key)
    assert found.exact
    found.save(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model: Any = PeftModel.from_pretrained(tiny.new_model(model), tmp_path / "out").eval()
    inputs = {key: tiny.oracle_of(case)[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = peft_model(**inputs).logits[inputs["attention_mask"].bool()]
    assert_close(logits, oracle_logits(case), torch.float32)


def test_what_peft_can_not_load_from_one_file_is_not_written_as_pefts() -> None:
    spec = tiny.spec_of(QWEN)
    experts = {k: t for k, t in tiny.tensors_of(EXPERTS).items() if ".experts." in k}
    source = make_source({**tiny.tensors_of(DORA), **experts}, tiny.config_of(EXPERTS))
    with pytest.raises(AdapterError, match=r"has DoRA on some linears and none on .*gate_up_proj"):
        convert(source, spec, "peft")
    found = convert(source, spec, "3d")
    assert found.exact and found.config["use_dora"]
    with pytest.raises(AdapterError, match=r"q_proj has DoRA: .* can't be refitted"):
        convert(source, spec, "3d", rank=2)
