"""How the compiled CPU kernels are built, found again, chosen, and done without."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled
import moegraft.backends.cpp.library as library_module
from cpu_layer import mixed_adapters
from moegraft.backends.cpp import build
from moegraft.backends.cpp.build import BuildError
from moegraft.backends.cpp.instructions import available
from moegraft.backends.cpp.library import Library, best_library
from moegraft.errors import MoegraftError
from moegraft.sites import expert_site
from moegraft.testing import assert_case, layer_case

ADAPTERS = mixed_adapters(expert_site("experts", 5, 24, 20), torch.float32)
CASE = layer_case(9, ADAPTERS, [-1, 0, 1, 2, 3, 4])


def test_a_library_is_compiled_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled.require()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    worst = available()[-1]
    with caplog.at_level(logging.INFO, "moegraft"):
        first = build.library_path.__wrapped__(worst)
        assert first.parent == tmp_path / "moegraft" / "cpp"
        made = first.stat().st_mtime_ns
        assert build.library_path.__wrapped__(worst) == first
    assert first.stat().st_mtime_ns == made
    assert [r.message.startswith("Compiled the CPU kernels") for r in caplog.records] == [True]
    assert {path.suffix for path in first.parent.iterdir()} == {".so", ".sha256"}
    assert len(list(first.parent.iterdir())) == 2
    first.chmod(0o722)
    with pytest.raises(BuildError, match="others may write to it"):
        build.library_path.__wrapped__(worst)


def test_a_compiler_that_does_not_know_the_best_instructions_gets_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled.require()
    if len(available()) < 2:
        pytest.skip("one instruction set")
    best, second, *_ = available()
    refused = next(flag for flag in best.flags if flag not in second.flags)
    old = tmp_path / "old-compiler"
    old.write_text(
        f'#!/bin/sh\ncase "$*" in *{refused}*) echo "error: {refused}?" >&2; exit 1;; esac\n'
        f'exec {" ".join(build.compiler())} "$@" -O0\n'
    )
    old.chmod(0o700)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOEGRAFT_COMPILE", raising=False)
    build.library_path.cache_clear()
    library_module._library.cache_clear()
    try:
        found = best_library()
        assert isinstance(found, Library) and found.instructions == second
    finally:
        build.library_path.cache_clear()
        library_module._library.cache_clear()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "CXX='no-such-compiler' is not there"),
        ({"CXX": "false"}, "false failed: no message"),
        ({"MOEGRAFT_COMPILE": "0"}, "MOEGRAFT_COMPILE=0"),
        ({"PATH": ""}, "no C++ compiler"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "no cache can be made"),
        ({"CXX": '"c++'}, "it can't be built: No closing quotation"),
    ],
)
def test_without_a_build_there_is_a_reason_one_log_line_and_torch(
    settings: dict[str, str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not available():
        pytest.skip("no instruction set is served here")
    for name in ("CXX", "MOEGRAFT_COMPILE", "MOEGRAFT_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    build.library_path.cache_clear()
    library_module._library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "moegraft"):
            layer = CASE.layer()
            assert_case(CASE, layer)
        plan = layer.plan(9, 2)
        assert plan.backend == "cpu"
        assert reason in plan.reasons[0]
        assert len([r for r in caplog.records if "no compiled kernels" in r.message]) == 1
    finally:
        build.library_path.cache_clear()
        library_module._library.cache_clear()


def test_a_disk_without_room_is_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled.require()

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", full)
    with pytest.raises(BuildError, match="No space left on device"):
        build.library_path.__wrapped__(available()[0])


@pytest.mark.parametrize("damage", ["half", "empty", "another", "no checksum"])
def test_a_damaged_library_is_built_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled.require()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    instructions = available()[-1]
    path = build.library_path.__wrapped__(instructions)
    whole = path.read_bytes()
    if damage == "no checksum":
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes({"half": whole[: len(whole) // 2], "empty": b""}.get(damage, whole + b"."))
    assert build.library_path.__wrapped__(instructions) == path
    assert len(path.read_bytes()) == len(whole)


def test_the_arena_lives_until_the_kernels_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank that grows in another thread lets go of the old one, whose address they have."""
    compiled.require()
    layer = CASE.layer("cpp")
    wanted = CASE.run(layer)
    table = layer.table
    assert table is not None
    old = weakref.ref(table.arena.data.untyped_storage())
    run, alive = Library.layer, []

    def grown(library: Library, arguments: Any) -> None:
        table.arena.data = table.arena.data.clone()
        gc.collect()
        alive.append(old() is not None)
        run(library, arguments)

    monkeypatch.setattr(Library, "layer", grown)
    assert torch.equal(CASE.run(layer), wanted)
    assert alive == [True]


def test_instructions_may_be_chosen_among_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.require()
    worst = available()[-1]
    monkeypatch.setenv("MOEGRAFT_COMPILE", worst.name)
    chosen = best_library()
    assert isinstance(chosen, Library) and chosen.instructions == worst
    layer = CASE.layer("cpp")
    assert f"compiled for {worst.name}: " in layer.plan(9, 2).explain()
    assert_case(CASE, layer)
    monkeypatch.setenv("MOEGRAFT_COMPILE", "mmx")
    with pytest.raises(MoegraftError, match=f"MOEGRAFT_COMPILE='mmx'.*{worst.name}"):
        CASE.layer()
