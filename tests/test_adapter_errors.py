"""Damaged, incomplete or foreign adapter files and configs: refused by name, never half loaded."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny
from moegraft.adapters import ReadOptions, make_source, read_adapter
from moegraft.adapters.arrange import Places
from moegraft.adapters.tensor_file import _CHUNK_BYTES, _Reader
from moegraft.errors import AdapterError

CASE = "peft/0.21.2/qwen3_moe/experts"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MiB = 1 << 20


def write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """A copy of the fixture adapter with other tensors or config fields."""
    save_file(tensors or tiny.tensors_of(CASE), folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(tiny.config_of(CASE, **changes)))
    return folder


def test_a_folder_its_file_and_a_string_path_all_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    for path in (folder, str(folder), folder / WEIGHTS):
        assert set(read_adapter(path).tensors) == set(tiny.tensors_of(CASE))


@pytest.mark.parametrize("path", ["nowhere", "someone/adapter", "", "a\0b", "../../nowhere"])
def test_a_path_that_is_no_adapter_is_refused_without_any_download(path: str) -> None:
    with pytest.raises(AdapterError, match="never downloads"):
        read_adapter(Path("/nonexistent") / path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(AdapterError, match=f"expected a folder with {WEIGHTS}"):
        read_adapter(tmp_path)


class _Bomb:
    """Writes a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.ckpt"])
def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    trap = tmp_path / "trap"
    (tmp_path / name).write_bytes(pickle.dumps(_Bomb(str(trap))))
    (tmp_path / CONFIG).write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(AdapterError, match="Convert it where you trust it"):
            read_adapter(path)
    assert not trap.exists()


def test_a_pickle_under_the_name_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(pickle.dumps(_Bomb(str(trap))))
    with pytest.raises(AdapterError, match="not a readable safetensors file"):
        read_adapter(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("damage", ["truncated", "random", "empty", "huge_header", "bad_header"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = write_adapter(tmp_path) / WEIGHTS
    good = path.read_bytes()
    noise = torch.randint(0, 256, (4096,), generator=torch.Generator().manual_seed(0))
    header = int.from_bytes(good[:8], "little")
    bad = {
        "truncated": good[:-7],
        "random": bytes(noise.tolist()),
        "empty": b"",
        "huge_header": (1 << 62).to_bytes(8, "little") + good[8:],
        "bad_header": good[:8] + b"{" * header + good[8 + header :],
    }
    path.write_bytes(bad[damage])
    with pytest.raises(AdapterError, match="not a readable safetensors file"):
        read_adapter(tmp_path)


def test_a_missing_config_is_refused_because_the_scale_is_unknown(tmp_path: Path) -> None:
    (write_adapter(tmp_path) / CONFIG).unlink()
    with pytest.raises(AdapterError, match=r"is missing: without it rank and alpha"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not readable JSON"),
        (b"", "not readable JSON"),
        (b"\xff\xfe{}", "not readable JSON"),
        (b"[" * 100_000, "not readable JSON"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (write_adapter(tmp_path) / CONFIG).write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        read_adapter(tmp_path)


def test_a_config_in_utf_8_with_a_byte_order_mark_reads(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, base_model_name_or_path="modèle") / CONFIG
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_adapter(tmp_path).config.lora_alpha == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'; only LORA"),
        ({"peft_type": None}, "only LORA"),
        ({"r": 0}, "r=0 is out of range"),
        ({"r": -1}, "r=-1 is out of range"),
        ({"r": 2.5}, "r=2.5 is not a whole number"),
        ({"r": "8"}, "r='8' is not a number"),
        ({"r": True}, "r=True is not a number"),
        ({"r": 10**400}, "r=.* is out of range"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan is out of range"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf is out of range"),
        ({"lora_alpha": [1]}, r"lora_alpha=\[1\] is not a number"),
        ({"use_rslora": "false"}, "use_rslora='false' is not true or false"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": None}}, "rank_pattern: 'q_proj'=None is not a number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: 'q_proj'=0 is out of range"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: 'q_proj'='x' is not a number"),
        (
            {"rank_pattern": {"(q_proj": 4}},
            r"rank_pattern key '\(q_proj' can't be used: it is not a regular",
        ),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "it uses look-behind, flags"),
        ({"rank_pattern": {"a{99999999999}": 4}}, "is not a regular expression"),
        ({"alpha_pattern": {"(" * 2000 + ")" * 2000: 4}}, "4,000 characters, more than 1,000"),
        (
            {"alpha_pattern": {"(" * 400 + ")" * 400: 4}},
            "can't be used: it (is not a|uses more than 20)",
        ),
        ({"target_parameters": 3}, "target_parameters must be a list of names"),
        ({"target_parameters": [3]}, "target_parameters must be a list of names"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: activated LoRA"),
        ({"layer_replication": [[0, 1]]}, "layer replication is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': .*changes the base weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"init_lora_weights": "OLoRA"}, "changes the base weights"),
        ({"init_lora_weights": "loftq"}, "changes the base weights"),
    ],
)
def test_a_bad_config_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        make_source(tiny.tensors_of(CASE), tiny.config_of(CASE, **changes))


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", None])
def test_an_initialisation_that_leaves_the_base_alone_is_accepted(init: Any) -> None:
    make_source(tiny.tensors_of(CASE), tiny.config_of(CASE, init_lora_weights=init))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_refused_by_name(bad: float, dtype: torch.dtype) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in tiny.tensors_of(CASE).items()}
    key = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    tensors[key] = tensors[key].clone()
    tensors[key][5, 7] = bad
    with pytest.raises(AdapterError, match="holds 1 NaN or infinite values of 288") as caught:
        make_source(tensors, tiny.config_of(CASE))
    assert key in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool])
def test_a_dtype_that_is_not_served_is_refused_by_name(dtype: torch.dtype) -> None:
    key, tensor = next(iter(tiny.tensors_of(CASE).items()))
    with pytest.raises(AdapterError, match="float32, bfloat16 or float16") as caught:
        make_source({**tiny.tensors_of(CASE), key: tensor.to(dtype)}, tiny.config_of(CASE))
    assert key in str(caught.value) and str(dtype) in str(caught.value)


@pytest.mark.parametrize(
    "tensors",
    [{}, {"model.layers.0.mlp.gate.weight": torch.ones(4, 24)}, {"lora": torch.ones(2)}],
)
def test_a_file_without_any_lora_factor_is_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(AdapterError, match=f"none of its {len(tensors)} tensors is a LoRA factor"):
        make_source(tensors, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("(",)}, r"skip '\(' is not a regular expression"),
        ({"skip": None}, "skip=None must be a list of regular expressions"),
        ({"skip": (3,)}, r"skip=\(3,\) must be a list"),
        ({"orientation": "transposed"}, "orientation='transposed'"),
        ({"expert_b_layout": "grouped"}, "expert_b_layout='grouped'"),
        ({"gate_up_rows": "gate_first"}, "gate_up_rows='gate_first'"),
    ],
)
def test_a_mistyped_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        ReadOptions(**options)


def test_one_skip_pattern_may_be_a_plain_string() -> None:
    assert ReadOptions(skip="lm_head").skip == ("lm_head",)  # type: ignore[arg-type]


UNREADABLE = Path("/proc/self/mem")  # a regular file whose first bytes are an I/O error


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs Linux's /proc")
def test_an_error_of_the_disk_is_an_adapter_error(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).symlink_to(UNREADABLE)
    with pytest.raises(AdapterError, match=r"can't be read: Input/output error\.$"):
        read_adapter(tmp_path)


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("num_bytes", [8, _CHUNK_BYTES + 1], ids=["alone", "by threads"])
def test_an_error_of_the_disk_within_the_values_is_an_adapter_error(num_bytes: int) -> None:
    data = torch.empty(num_bytes, dtype=torch.uint8)
    places = Places(*np.array([[0], [0], [num_bytes]]))
    refused = pytest.raises(AdapterError, match=r"^x can't be read: Input/output error\.$")
    with UNREADABLE.open("rb") as file, _Reader(file, 0, data, places) as reader, refused:
        reader.finish("x")
