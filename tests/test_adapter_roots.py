"""Where adapters may be read from: an allowed root, links, files that are none or change."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from moegraft.adapters import read_adapter
from moegraft.adapters import safe_open as opening
from moegraft.adapters.file_policy import FilePolicy
from moegraft.errors import AdapterError

CASE = "peft/0.21.2/qwen3_moe/experts"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed root with an adapter in it, beside one that is not allowed."""
    for name in ("allowed/a", "outside/a"):
        (tmp_path / name).mkdir(parents=True)
        for file in (WEIGHTS, CONFIG):
            shutil.copyfile(tiny.folder(CASE) / file, tmp_path / name / file)
    return tmp_path / "allowed"


def reads(path: Path | str, root: Path | str | None) -> bool:
    """True when the adapter is read, False when it is refused as outside."""
    try:
        source = read_adapter(path, FilePolicy(root=root))
    except AdapterError as error:
        assert "is outside of the folder that adapters may be read from" in str(error)
        return False
    assert set(source.tensors) == set(tiny.tensors_of(CASE))
    return True


def test_adapters_inside_the_root_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (root / "a", root / "a" / WEIGHTS, str(root / "a"), root / "a" / ".." / "a"):
        assert reads(path, root)
    assert reads(root / "a", str(root)) and reads(root / "a", root / "a")
    assert reads(root / "a", None) and reads(root.parent / "outside" / "a", None)
    monkeypatch.chdir(root)
    assert reads("a", root) and reads("a", ".") and reads(Path("./a"), Path("../allowed"))


@pytest.mark.parametrize(
    "path",
    [
        *("..", "../outside/a", f"../outside/a/{WEIGHTS}", "a/../../outside/a", "/", "/etc/passwd"),
        *("../allowed-not", "../nowhere", "a/../../../../../../etc"),
    ],
)
def test_whatever_leaves_the_root_is_refused_without_a_look(root: Path, path: str) -> None:
    assert not reads(f"{root}/{path}" if not path.startswith("/") else path, root)


def test_a_folder_whose_name_begins_like_the_roots_is_outside(root: Path) -> None:
    shutil.copytree(root, root.parent / "allowed-2")
    assert not reads(root.parent / "allowed-2" / "a", root)


def test_a_refusal_does_not_say_whether_the_file_exists(root: Path) -> None:
    messages = set()
    for name in ("a", "b"):  # the first is there
        with pytest.raises(AdapterError) as caught:
            read_adapter(root.parent / "outside" / name, FilePolicy(root=root))
        messages.add(str(caught.value).replace(f"outside/{name}", "*"))
    assert len(messages) == 1


def test_a_folder_of_adapters_is_listed_to_those_who_may_look_anywhere(root: Path) -> None:
    with pytest.raises(AdapterError, match=r"There are adapters inside; give one of them: .*/a"):
        read_adapter(root)
    with pytest.raises(AdapterError, match="There is no adapter at") as caught:
        read_adapter(root, FilePolicy(root=root))
    assert "/a" not in str(caught.value).replace(str(root), "")


def link_folder(root: Path) -> Path:
    (root / "link").symlink_to(root.parent / "outside" / "a")
    return root / "link"


def link_parent(root: Path) -> Path:
    (root / "link").symlink_to("../outside")
    return root / "link" / "a"


def link_weights(root: Path) -> Path:
    (root / "a" / WEIGHTS).unlink()
    (root / "a" / WEIGHTS).symlink_to(root.parent / "outside" / "a" / WEIGHTS)
    return root / "a"


def link_config(root: Path) -> Path:
    (root / "a" / CONFIG).unlink()
    (root / "a" / CONFIG).symlink_to(root.parent / "outside" / "a" / CONFIG)
    return root / "a"


def link_chain(root: Path) -> Path:
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("a/../../outside/a")
    return root / "one"


LINKS = [link_folder, link_parent, link_weights, link_config, link_chain]


@pytest.mark.parametrize("make", LINKS, ids=lambda make: make.__name__)
def test_links_out_of_the_root_are_followed_and_refused(
    root: Path, make: Callable[[Path], Path]
) -> None:
    path = make(root)
    assert not reads(path, root)
    assert reads(path, root.parent) and reads(path, None)


def test_links_within_the_root_are_followed(root: Path) -> None:
    """As in a download cache: snapshots link to blobs."""
    (root / "blobs").mkdir()
    (root / "snapshot").mkdir()
    for i, file in enumerate((WEIGHTS, CONFIG)):
        shutil.copyfile(root / "a" / file, root / "blobs" / str(i))
        (root / "snapshot" / file).symlink_to(f"../blobs/{i}")
    assert reads(root / "snapshot", root)
    (root.parent / "alias").symlink_to(root)
    assert reads(root.parent / "alias" / "a", root) and reads(root / "a", root.parent / "alias")


def test_links_in_a_circle_are_refused(root: Path) -> None:
    (root / "x").symlink_to("y")
    (root / "y").symlink_to("x")
    (root / "a" / WEIGHTS).unlink()
    (root / "a" / WEIGHTS).symlink_to(WEIGHTS)
    for path in (root / "x", root / "x" / "z", root / "a"):
        for allowed in (root, None):
            with pytest.raises(AdapterError):
                read_adapter(path, FilePolicy(root=allowed))


@pytest.mark.parametrize("target", ["folder", "file"])
def test_a_link_put_in_place_after_the_check_is_not_followed(
    root: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = opening.check_inside

    def check_then_swap(path: Path, policy: FilePolicy) -> Path:
        real = check(path, policy)
        if real.name == WEIGHTS:  # what an attacker would do in between
            swapped = real.parent if target == "folder" else real
            swapped.rename(swapped.with_name("old"))
            relative = swapped.relative_to(root)
            swapped.symlink_to(root.parent / "outside" / relative)
        return real

    monkeypatch.setattr(opening, "check_inside", check_then_swap)
    with pytest.raises(AdapterError, match="can't be opened"):
        read_adapter(root / "a", FilePolicy(root=root))


def test_no_swap_at_any_moment_brings_in_what_is_outside(root: Path) -> None:
    outside = root.parent / "outside" / "a" / CONFIG
    outside.write_text(outside.read_text().replace("{", '{"secret": 1,', 1))
    good, evil, done = root / "good", root / "evil", threading.Event()
    (root / "a").rename(good)
    evil.symlink_to(root.parent / "outside" / "a")

    def swap() -> None:
        while not done.is_set():
            for source in (good, evil):
                temporary = root / "temporary"
                temporary.symlink_to(source.name)
                temporary.replace(root / "a")

    thread = threading.Thread(target=swap)
    thread.start()
    read = 0
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            try:
                source = read_adapter(root / "a", FilePolicy(root=root))
            except AdapterError:
                continue
            assert "secret" not in source.config.raw
            read += 1
    finally:
        done.set()
        thread.join()
    assert read, "some reads hit the good one"


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_pipe_is_refused_without_waiting_for_its_writer(
    root: Path, file: str, allowed: bool
) -> None:
    (root / "a" / file).unlink()
    os.mkfifo(root / "a" / file)
    start = time.monotonic()
    with pytest.raises(AdapterError, match="is no regular file"):
        read_adapter(root / "a", FilePolicy(root=root if allowed else None))
    assert time.monotonic() - start < 5


def test_devices_and_folders_in_place_of_files_are_refused(root: Path) -> None:
    (root / "a" / CONFIG).unlink()
    (root / "a" / CONFIG).mkdir()
    with pytest.raises(AdapterError, match="is no regular file"):
        read_adapter(root / "a")
    with pytest.raises(AdapterError, match="is no regular file"):
        read_adapter("/dev/zero")


def test_a_file_of_holes_that_is_larger_than_the_limit_is_refused(root: Path) -> None:
    os.truncate(root / "a" / WEIGHTS, 1 << 40)
    with pytest.raises(AdapterError, match="over the limit of 68,719,476,736"):
        read_adapter(root / "a")
    os.truncate(root / "a" / CONFIG, 1 << 30)
    with pytest.raises(AdapterError, match=r"FilePolicy\.max_bytes"):
        read_adapter(root / "a", FilePolicy(max_bytes=1 << 20))
    shutil.copyfile(root.parent / "outside" / "a" / WEIGHTS, root / "a" / WEIGHTS)
    with pytest.raises(AdapterError, match=r"FilePolicy\.max_config_bytes"):
        read_adapter(root / "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": "/nonexistent"}, "root='/nonexistent' is no folder"),
        ({"root": 3}, "root=3 is no folder"),
        ({"max_bytes": 0}, "max_bytes=0 is no whole number over 0"),
        ({"max_tensors": "many"}, "max_tensors='many'"),
        ({"max_header_bytes": True}, "max_header_bytes=True"),
        ({"max_config_bytes": 2.5}, "max_config_bytes=2.5"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        FilePolicy(**options)


@pytest.mark.parametrize(
    "path", ["a\nb", "a\x1b[31mb", "x" * 5000, "\udcff", "a\0b", 3, None, b"a"]
)
def test_a_path_of_any_kind_is_refused_in_one_line(root: Path, path: Any) -> None:
    for policy in (FilePolicy(root=root), FilePolicy()):
        given = str(root / path) if isinstance(path, str) else path
        with pytest.raises(AdapterError) as caught:
            read_adapter(given, policy)
        assert str(caught.value).isprintable()
