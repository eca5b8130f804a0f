"""Real adapter folders with bytes changed, files of 100,000 tensors, every dtype and scale."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tiny
from moegraft.adapters import ModelSpec, bind, check_bound, make_source, read_adapter
from moegraft.errors import AdapterError
from moegraft.sites import expert_site, linear_site
from moegraft.types import WeightLayout
from tiny_grafts import new_graft

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CASES = (
    "peft/0.21.2/qwen3_moe/experts",
    "peft/0.21.2/qwen3_moe/patterns",
    "per_expert/qwen3_moe/gate_only",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOW_DISK = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def load(folder: Path) -> str:
    """All of a load but the store: "" or the error's one line; anything else is a failure."""
    try:
        spec = tiny.spec_of("qwen3_moe")
        check_bound(bind(read_adapter(folder), spec).report, spec)
    except AdapterError as error:
        assert str(error).isprintable() and len(str(error)) < 20_000
        return str(error)
    return ""


@st.composite
def changed(draw: st.DrawFn, original: bytes, limit: int) -> bytes:
    """Some bytes of the first ``limit`` set, cut out, repeated or put in."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(limit, len(content))))
        count = draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["set", "cut", "repeat", "insert", "end"]))
        if kind == "set":
            content[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "cut":
            del content[at : at + count]
        elif kind == "repeat":
            content[at:at] = content[at : at + count] * draw(st.integers(1, 50))
        elif kind == "insert":
            content[at:at] = draw(st.binary(max_size=20))
        else:
            del content[at:]
    return bytes(content)


@pytest.mark.parametrize("case", CASES)
@SLOW_DISK
@given(st.data())
def test_any_change_of_a_weight_file_loads_or_is_refused_in_one_line(
    tmp_path: Path, case: str, data: st.DataObject
) -> None:
    original = (tiny.folder(case) / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    content = data.draw(changed(original[:header], header)) + original[header:]
    if data.draw(st.booleans()):  # the length says what is there, so the change is in the JSON
        length = len(content) - (len(original) - header) - 8
        content = max(length, 0).to_bytes(8, "little") + content[8:]
    (tmp_path / WEIGHTS).write_bytes(content)
    (tmp_path / CONFIG).write_bytes((tiny.folder(case) / CONFIG).read_bytes())
    load(tmp_path)


@pytest.mark.parametrize("case", CASES)
@SLOW_DISK
@given(st.data())
def test_any_change_of_a_config_file_loads_or_is_refused_in_one_line(
    tmp_path: Path, case: str, data: st.DataObject
) -> None:
    original = (tiny.folder(case) / CONFIG).read_bytes()
    if not (tmp_path / WEIGHTS).exists():
        (tmp_path / WEIGHTS).write_bytes((tiny.folder(case) / WEIGHTS).read_bytes())
    (tmp_path / CONFIG).write_bytes(data.draw(changed(original, len(original))))
    load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"r": 3, "r": 4}', "holds the key 'r' twice"),
        ('{"r": 3, "rank_pattern": {"a": 1, "a": 2}}', "holds the key 'a' twice"),
        ('{"r": 3, "lora_alpha": NaN}', "holds NaN, which is no JSON number"),
        ('{"r": 3, "x": -Infinity}', "holds -Infinity"),
        ('{"r": 1e999}', "r=inf is out of range"),
        ('{"r": 3, "x": %s}' % ("[" * 100 + "]" * 100), "nests deeper than 32 levels"),
        ('{"r": 3, "x": %s}' % ("[" * 100_000 + "]" * 100_000), "not readable JSON"),
        ('{"r": %s}' % ("9" * 5000), "not readable JSON"),
        ('{"r": "%s"}' % ("x" * 100_000), r"r='x{80}\.\.\.' is not a number"),
        ('{"r": "a\\nb\\u001b[31m"}', r"r='a\\nb\\x1b\[31m' is not a number"),
        ('{"peft_type": "a\\nb"}', r"peft_type='a\\nb'"),
        ('{"target_parameters": {"a": "\\n"}}', "must be a list of names"),
        ('{"lora_alpha": 1e308, "r": 1}', "overflows"),
        ('{"lora_alpha": -1e308, "r": 1}', "overflows"),
        ('{"lora_alpha": 8, "r": 0}', "r=0 is out of range"),
        ('{"lora_alpha": 8, "r": -3}', "r=-3 is out of range"),
        ('{"lora_alpha": 8, "r": 1.5}', "r=1.5 is not a whole number"),
    ],
)
def test_a_hostile_config_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / WEIGHTS).write_bytes((tiny.folder(CASES[0]) / WEIGHTS).read_bytes())
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(AdapterError, match=message):
        spec = tiny.spec_of("qwen3_moe")
        check_bound(bind(read_adapter(tmp_path), spec).report, spec)
    assert load(tmp_path)


@pytest.mark.parametrize("filler", ["[],", "{},", "0,", '"",', "[[[[],[]]]],", '{"":0},'])
def test_a_long_hostile_config_costs_little_memory(tmp_path: Path, filler: str) -> None:
    (tmp_path / WEIGHTS).write_bytes((tiny.folder(CASES[0]) / WEIGHTS).read_bytes())
    text = '{"target_modules": [%s0]}' % (filler * (12_000_000 // len(filler)))
    (tmp_path / CONFIG).write_text(text)
    tracemalloc.start()
    try:
        assert "holds more than 2,000,000 values" in load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
    finally:
        tracemalloc.stop()


def test_names_with_control_characters_never_reach_a_message(tmp_path: Path) -> None:
    tensors = {**tiny.tensors_of(CASES[0]), "a\n\x1b[2J.lora_A.weight": torch.ones(1, 1)}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(tiny.config_of(CASES[0])))
    assert r"named 'a\n\x1b[2J.lora_A.weight'" in load(tmp_path)
    with pytest.raises(AdapterError, match="printable characters"):
        make_source(tensors, tiny.config_of(CASES[0]))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("served", DTYPES)
def test_factors_of_any_served_dtype_are_rounded_once_to_the_models(
    stored: torch.dtype, served: torch.dtype
) -> None:
    case = "peft/0.21.2/qwen3_moe/all_linear"
    config = tiny.config_of(case)
    tensors = {k: (t * 1.001).to(stored) for k, t in tiny.tensors_of(case).items()}
    rounded = {k: t.to(served) for k, t in tensors.items()}
    mixed = {k: t if "lora_B" in k else t.to(served) for k, t in tensors.items()}
    graft = new_graft("qwen3_moe", served)
    sums = {
        graft.load_tensors(name, given, config).checksum
        for name, given in (("stored", tensors), ("rounded", rounded), ("mixed", mixed))
    }
    assert len(sums) == 1
    graft.detach()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_values_that_the_models_dtype_cannot_hold_are_refused(stored: torch.dtype) -> None:
    tensors = dict(tiny.tensors_of(CASES[0]))
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = torch.full_like(tensors[key], 1e5).to(stored)
    graft = new_graft("qwen3_moe", torch.float16)
    with pytest.raises(AdapterError, match="beyond float16's range of 65504"):
        graft.load_tensors("x", tensors, tiny.config_of(CASES[0]))
    assert graft.adapters == ()
    graft.detach()


@pytest.mark.parametrize(
    ("alpha", "rank", "served"),
    [(1e38, 1, True), (3.5e38, 1, False), (-3.5e38, 1, False), (1e308, 2, False), (0.0, 4, True)],
)
@pytest.mark.parametrize("rslora", [True, False])
def test_only_scales_that_are_finite_in_fp32_are_served(
    alpha: float, rank: int, served: bool, rslora: bool
) -> None:
    config = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora}
    source = make_source(tiny.tensors_of(CASES[0]), config)
    spec = tiny.spec_of("qwen3_moe")
    if served:
        assert bind(source, spec).report.bound
        return
    with pytest.raises(AdapterError, match=r"the scale .* overflows"):
        bind(source, spec)


def expert_keys(layers: int, experts: int) -> list[str]:
    """Names of the tensors of a large per-expert adapter."""
    return [
        f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{p}_proj.lora_{x}.weight"
        for layer in range(layers)
        for e in range(experts)
        for p in ("gate", "up", "down")
        for x in "AB"
    ]


def test_an_adapter_of_100_000_tensors_loads_in_bounded_time(tmp_path: Path) -> None:
    names = expert_keys(66, 256)
    one = {"A": torch.ones(1, 2), "B": torch.ones(2, 1)}
    save_file({n: one["A" if "lora_A" in n else "B"].clone() for n in names}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text('{"r": 1, "lora_alpha": 2}')
    sites = tuple(
        expert_site(f"model.layers.{i}.mlp.experts", 256, 2, 2, WeightLayout()) for i in range(66)
    )
    start = time.perf_counter()
    report = bind(read_adapter(tmp_path), ModelSpec(sites)).report
    assert report.bound == report.total == len(names) > 100_000
    assert time.perf_counter() - start < 90


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.{0}.gate_proj.lora_A.weight",
        "{0}.base_layer.base_layer.base_layer.base_layer.lora_A.weight",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "model.layers.{0}.self_attn.q_proj.lora_A.weight",
                "model.layers.0.mlp.experts.0.gate_proj.{0}.lora_A.weight",
                "model.layers.0.mlp.experts.lora_A.{0}",
                "lora_A.{0}",
            )
        ),
    ],
)
def test_100_000_tensors_that_fit_nowhere_are_refused_in_bounded_time(name: str) -> None:
    sites = (
        expert_site("model.layers.0.mlp.experts", 4, 2, 2, WeightLayout()),
        linear_site("model.layers.0.self_attn.q_proj", 2, 2),
    )
    spec, factor = ModelSpec(sites), torch.ones(1, 2)
    start = time.perf_counter()
    source = make_source({name.format(i): factor for i in range(100_000)}, {"r": 1})
    report = bind(source, spec).report
    assert report.bound == 0 and len(report.refused) == 100_000
    with pytest.raises(AdapterError) as caught:
        check_bound(report, spec)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 20_000
    assert time.perf_counter() - start < 90


@pytest.mark.parametrize("header", ["{}", "{ }", '{"__metadata__": {"format": "pt"}}'])
def test_a_file_without_tensors_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / CONFIG).write_text('{"r": 8, "lora_alpha": 8}')
    text = header.encode() + b" " * (-len(header) % 8)
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    assert "none of its 0 tensors is a LoRA factor" in load(tmp_path)
