"""Adapters that can't be served: an answer with our words, and an engine that lives on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import BASE, Models, Tensors
from safetensors.torch import load_file, save_file
from server import Server, running_server

_GATE = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"
_QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _nan(tensors: Tensors) -> None:
    tensors[_GATE][0, 0] = torch.nan


def _no_partner(tensors: Tensors) -> None:
    del tensors[_GATE]


def _other_size(tensors: Tensors) -> None:
    tensors[_GATE] = torch.zeros(4, 63)


def _other_layer(tensors: Tensors) -> None:
    for leaf in ("lora_A", "lora_B"):
        old = _GATE.replace("lora_A", leaf)
        tensors[old.replace("layers.0", "layers.7")] = tensors.pop(old)


def _ninth_expert(tensors: Tensors) -> None:
    for leaf in ("lora_A", "lora_B"):
        old = _GATE.replace("lora_A", leaf)
        tensors[old.replace("experts.0", "experts.8")] = tensors.pop(old)


def _rank(tensors: Tensors) -> None:
    for key, tensor in list(tensors.items()):
        shape = (32, tensor.shape[1]) if "lora_A" in key else (tensor.shape[0], 32)
        tensors[key] = torch.zeros(shape)


def _linear_size(tensors: Tensors) -> None:
    tensors[_QUERY] = torch.zeros(4, 60)


def _linear_layer(tensors: Tensors) -> None:
    for leaf in ("lora_A", "lora_B"):
        old = _QUERY.replace("lora_A", leaf)
        tensors[old.replace("layers.0", "layers.9")] = tensors.pop(old)


def _linear_alone(tensors: Tensors) -> None:
    del tensors[_QUERY]


def _linear_rank(tensors: Tensors) -> None:
    tensors[_QUERY] = torch.zeros(17, 64)
    tensors[_QUERY.replace("lora_A", "lora_B")] = torch.zeros(128, 17)


def _dora(tensors: Tensors) -> None:
    tensors[_QUERY.replace("lora_A.weight", "lora_magnitude_vector")] = torch.ones(128)


_CASES: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("per_expert", _nan, "holds 1 NaN or infinite values"),
    ("per_expert", _no_partner, "its partner lora_A is missing"),
    ("per_expert", _other_size, "63 -> 32 matrix"),
    ("per_expert", _other_layer, "has no such module"),
    ("per_expert", _ninth_expert, "8"),
    ("per_expert", _rank, "start it with a --max-lora-rank of at least 32"),
    ("attention", _linear_size, "60 inputs and 128 outputs, the model has 64 and 128"),
    ("attention", _linear_layer, "the model has no model.layers.9.self_attn.q_proj"),
    ("attention", _linear_alone, "has no lora_A"),
    ("attention", _linear_rank, "rank 17 is over the engine's 16"),
    ("attention", _dora, "lora_magnitude_vector"),
]


def changed(folder: Path, models: Models, of: str, change: Callable[[Tensors], None]) -> Path:
    """Copy an adapter and change its tensors."""
    shutil.copytree(models.adapter(of), folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def assert_refused(server: Server, models: Models, folder: Path, message: str) -> None:
    """Assert an answer 400 with the message, and that the engine serves what it served."""
    answer = server.load("bad", folder)
    assert answer.status == 400, answer
    assert answer.message.startswith("moegraft refuses the adapter 'bad': ")
    assert message in answer.message and "stack trace" not in answer.message
    assert server.complete("bad", [5, 6, 7], 2).status == 404
    assert server.complete(BASE, [5, 6, 7], 2).body == models.greedy(BASE, [5, 6, 7], 2)


@pytest.mark.parametrize(
    ("of", "change", "message"), _CASES, ids=[change.__name__[1:] for _, change, _ in _CASES]
)
def test_a_bad_adapter_is_refused_by_name_and_the_engine_lives_on(
    of: str,
    change: Callable[[Tensors], None],
    message: str,
    server: Server,
    models: Models,
    tmp_path: Path,
) -> None:
    (before,) = server.counters()
    assert_refused(server, models, changed(tmp_path / "bad", models, of, change), message)
    (after,) = server.counters()
    assert after["adapters_refused"] == before["adapters_refused"] + 1
    assert after["adapters_loaded"] == before["adapters_loaded"]


def test_a_damaged_file_and_a_rank_over_the_engines_in_the_config(
    server: Server, models: Models, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "cut", models, "half", lambda tensors: None)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(server, models, folder, "not a readable safetensors file")
    folder = changed(tmp_path / "rank", models, "half", lambda tensors: None)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 64}))
    assert_refused(server, models, folder, "rank 64 is greater than max_lora_rank 16")


def test_a_bad_one_in_place_of_a_good_one_leaves_the_good_one(
    server: Server, models: Models, tmp_path: Path
) -> None:
    assert server.load("good", models.adapter("half")).status == 200
    bad = changed(tmp_path / "bad", models, "half", _nan)
    answer = server.load("good", bad, load_inplace=True)
    assert answer.status == 400, answer
    prompt = [9, 8, 7, 6]
    assert server.complete("good", prompt, 4).body == models.greedy("half", prompt, 4)
    assert server.unload("good").status == 200


def test_a_folder_that_is_not_there_is_404(server: Server, tmp_path: Path) -> None:
    answer = server.load("nobody", tmp_path / "nothing")
    assert answer.status == 404 and "No adapter found" in answer.message


def test_with_a_root_adapters_come_from_there_only(models: Models, tmp_path: Path) -> None:
    root, log = tmp_path / "root", tmp_path / "log.txt"
    inside = shutil.copytree(models.adapter("half"), root / "inside")
    (root / "link").symlink_to(models.adapter("half"))
    half = shutil.copytree(models.adapter("half"), root / "half")
    (half / "adapter_model.safetensors").unlink()
    file = models.adapter("half") / "adapter_model.safetensors"
    (half / "adapter_model.safetensors").symlink_to(file)
    with running_server(models.base, log, env={"MOEGRAFT_ADAPTER_ROOT": str(root)}) as server:
        for folder in (models.adapter("half"), root / "link", half):
            assert_refused(server, models, folder, "outside of the folder that adapters may be")
        assert server.load("inside", inside).status == 200
        assert server.complete("inside", [5, 6], 2).body == models.greedy("half", [5, 6], 2)


def test_an_engine_for_shared_outer_factors_serves_those_and_refuses_others(
    models: Models, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    with running_server(models.base, log, "--enable-moe-shared-loras") as server:
        assert server.load("outer", models.adapter("shared_outer")).status == 200
        prompt = [11, 12, 13, 14]
        assert server.complete("outer", prompt, 4).body == models.greedy("shared_outer", prompt, 4)
        wanted = "this engine was started with --enable-moe-shared-loras"
        assert_refused(server, models, models.adapter("per_expert"), wanted)
        assert server.complete("outer", prompt, 4).body == models.greedy("shared_outer", prompt, 4)
