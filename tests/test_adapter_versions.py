"""Adapters that change while they are read: one version in full, or an error; never a mixture."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from moegraft.adapters import read, read_adapter, tensor_file
from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.stored import Header
from moegraft.errors import AdapterError

CASE = "peft/0.21.2/qwen3_moe/experts"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an adapter ``a``."""
    shutil.copytree(tiny.folder(CASE), tmp_path / "root" / "a")
    return tmp_path / "root"


def lengthen(path: Path, header: Header) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def cut(path: Path, header: Header) -> None:
    os.truncate(path, header.data_begin + 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [(lengthen, "was written to while it was read"), (cut, r"it ended after [\d,]+ of")],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    root: Path,
    change: Callable[[Path, Header], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = tensor_file.read_header

    def change_meanwhile(*args: Any) -> Header:
        found = original(*args)
        change(root / "a" / WEIGHTS, found)
        return found

    monkeypatch.setattr(tensor_file, "read_header", change_meanwhile)
    with pytest.raises(AdapterError, match=message):
        read_adapter(root / "a")


def test_weights_and_config_are_of_one_version_whatever_is_put_in_place(tmp_path: Path) -> None:
    """A deploy flips a link, or renames a folder, while a server reads."""
    tensors, current, done = tiny.tensors_of(CASE), tmp_path / "current", threading.Event()
    for version in (1, 2):
        folder = tmp_path / str(version)
        folder.mkdir()
        save_file({k: t * version for k, t in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(tiny.config_of(CASE, lora_alpha=version)))

    def flip() -> None:
        while not done.is_set():
            for version in (1, 2):
                temporary = tmp_path / "temporary"
                temporary.symlink_to(str(version))
                temporary.replace(current)

    key, original = next(iter(tensors.items()))
    thread = threading.Thread(target=flip)
    current.symlink_to("1")
    thread.start()
    versions, refused = [], 0
    try:
        end = time.monotonic() + 3
        while time.monotonic() < end or not versions:
            try:
                source = read_adapter(current)
            except AdapterError as error:
                assert "was replaced or written to while it was read" in str(error)
                refused += 1
                continue
            versions.append(source.config.lora_alpha)
            assert torch.equal(source.tensors[key], original * versions[-1])
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("what", ["folder", "weights", "config"])
def test_a_version_that_is_replaced_between_the_two_files_is_refused(
    root: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "link").symlink_to("a")
    original = read._load_config

    def replace_first(*args: Any) -> Any:
        if what == "folder":
            (root / "a").rename(root / "old")
            shutil.copytree(root / "old", root / "a")
        else:
            file = root / "a" / {"weights": WEIGHTS, "config": CONFIG}[what]
            shutil.copyfile(file, root / "new")
            (root / "new").replace(file)
        return original(*args)

    monkeypatch.setattr(read, "_load_config", replace_first)
    with pytest.raises(AdapterError, match="may be of different versions: load it again"):
        read_adapter(root / "a", FilePolicy(root=root))
    monkeypatch.undo()
    read_adapter(root / "link", FilePolicy(root=root))


def test_a_link_that_is_flipped_between_the_two_files_leads_to_the_first_version(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, original = root / "link", read._load_config
    link.symlink_to("a")
    shutil.copytree(root / "a", root / "new")
    config = json.loads((root / "new" / CONFIG).read_text())
    (root / "new" / CONFIG).write_text(json.dumps({**config, "lora_alpha": 77}))

    def flip_first(*args: Any) -> Any:
        link.unlink()
        link.symlink_to("new")
        return original(*args)

    monkeypatch.setattr(read, "_load_config", flip_first)
    assert read_adapter(link, FilePolicy(root=root)).config.lora_alpha != 77
    monkeypatch.undo()
    assert read_adapter(link, FilePolicy(root=root)).config.lora_alpha == 77
