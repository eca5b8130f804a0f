"""Kinds of fault in security: pickles, downloads, names as paths; see ``docs/field-faults.md``."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moegraft
import tiny
from audit import adapter_files, what_happens
from moegraft.adapters import read_adapter
from moegraft.errors import AdapterError
from test_host_lifecycle import A, assert_generates
from tiny_grafts import new_graft

SOURCE = Path(moegraft.__file__).parent
#: Names through which Python unpickles or runs what a file says.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "marshal", "shelve"}
CALLS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("yaml", "load")}
BUILT_INS = {"eval", "exec", "compile", "__import__"}


def test_no_code_of_the_package_can_unpickle_or_evaluate_a_file() -> None:
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module]
            assert not {name.split(".")[0] for name in imported} & UNPICKLERS, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                name = owner.id if isinstance(owner, ast.Name) else ""
                assert (name, node.func.attr) not in CALLS, (path, node.lineno)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in BUILT_INS, (path, node.lineno)


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_in_place_of_tensors_is_refused_and_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    bomb = pickle.dumps(_Bomb(str(trap)))
    graft, config = new_graft("qwen3_moe"), tiny.config_of(A)
    key, tensor = next(iter(tiny.tensors_of(A).items()))
    as_bytes = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    for tensors in (bomb, {key: bomb}, {key: as_bytes}, {**tiny.tensors_of(A), key: _Bomb("x")}):
        with pytest.raises(AdapterError):
            graft.load_tensors("x", tensors, config)  # type: ignore[arg-type]
    with pytest.raises(AdapterError):
        graft.load_flat("x", as_bytes, {key: (0, tuple(tensor.shape))}, config)
    for index in (bomb, {bomb: (0, (1,))}):
        with pytest.raises(AdapterError):
            graft.load_flat("x", tensor.flatten(), index, config)  # type: ignore[arg-type]
    assert not trap.exists() and graft.adapters == ()
    graft.detach()


@pytest.mark.parametrize("base", ["someone/repo", "https://example.com/x", "../../etc", "/etc"])
def test_what_a_config_names_is_never_opened_or_fetched(tmp_path: Path, base: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tiny.tensors_of(A), folder / "adapter_model.safetensors")
    fields = ("path", "base_model_name_or_path", "revision", "parent_library", "corda_config")
    config = {**tiny.config_of(A), **dict.fromkeys(fields, base)}
    config["auto_mapping"] = {"base_model_class": "os", "parent_library": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    graft = new_graft("qwen3_moe")
    with what_happens() as events:
        graft.load("x", folder)
    assert [event for event, _ in events if event != "open"] == []
    assert adapter_files(events) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not [what for _, what in events if base in what]
    assert_generates(graft, ["x", None], [A, None])
    graft.detach()


@pytest.mark.parametrize("path", ["someone/repo", "hf://someone/repo", "https://example.com/a"])
def test_a_hub_name_in_place_of_a_path_opens_nothing(path: str) -> None:
    with what_happens() as events, pytest.raises(AdapterError, match="never downloads"):
        read_adapter(path)
    assert events == []


def test_pickles_beside_a_safetensors_file_are_never_opened(tmp_path: Path) -> None:
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copyfile(tiny.folder(A) / file, tmp_path / file)
    for name in ("adapter_model.bin", "adapter_model.pt", "training_args.bin", "optimizer.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(_Bomb(str(tmp_path / "trap"))))
    with what_happens() as events:
        assert set(read_adapter(tmp_path).tensors) == set(tiny.tensors_of(A))
    assert not [what for _, what in events if what.endswith((".bin", ".pt"))]
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    "name", ["/etc", "../x", "a/../../x", "~", "$HOME", "C:\\x", "file:///etc", "con", "."]
)
def test_a_name_opens_and_writes_nothing(name: str, tmp_path: Path) -> None:
    graft = new_graft("qwen3_moe")
    tensors, config = tiny.tensors_of(A), tiny.config_of(A)
    with what_happens() as events:
        graft.load_tensors(name, tensors, config)
        graft.update(name, tensors)
        graft.pin(name)
        graft.forward(torch.tensor([[3, 4]]), adapters=name)
        graft.unload(name)
        with pytest.raises(AdapterError, match="There is no adapter"):
            graft.forward(torch.tensor([[3, 4]]), adapters=name)
    assert [what for _, what in events if "site-packages" not in what and ".py" not in what] == []
    graft.detach()
