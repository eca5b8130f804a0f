"""The CUDA kernels compile for Hopper without a GPU, as they are meant to; and what is kept."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moegraft.backends.cuda import compiler
from moegraft.backends.cuda.compiler import CompileError
from moegraft.backends.cuda.group_shrink import STAGES, ShrinkSpec
from moegraft.backends.cuda.moe_gemm import Spec
from moegraft.backends.cuda.products import sources

#: What a program may have on Hopper.
SHARED_BYTES = 232_448
#: Registers that a few values may leave for a moment; a K loop that spills takes more.
SPILLED_BYTES = 256
#: Says that products wait for each other, which costs half of the rate.
SERIALISED = re.compile(r"C751[0-8]|serialized")

BLOCK_M, GEMM_STAGES = 192, 3
FP8_TILE = (128, 4)
SPECS = {
    "gate_up": Spec(BLOCK_M, GEMM_STAGES, True, True, False, False, 8, (0, 768)),
    "gate_up with adapters": Spec(BLOCK_M, GEMM_STAGES, True, True, False, True, 8, (768, 0)),
    "no gate": Spec(BLOCK_M, GEMM_STAGES, True, False, False, True, 6, (0, 128), "relu2"),
    "limits and biases": Spec(
        BLOCK_M, GEMM_STAGES, True, True, False, True, 4, (0, 2816), "silu", alpha=1.702,
        limit=7.0, up_shift=1.0, bias=torch.bfloat16,
    ),
    "down": Spec(
        BLOCK_M, GEMM_STAGES, False, False, True, True, 1, (0, 128), bias=torch.float32,
        weight=torch.bfloat16,
    ),
    "FP8 gate_up": Spec(*FP8_TILE, True, True, False, False, 8, (0, 768), fp8=True),
    "FP8 gate_up with adapters": Spec(*FP8_TILE, True, True, False, True, 8, (768, 0), fp8=True),
    "FP8 no gate": Spec(*FP8_TILE, True, False, False, True, 6, (0, 128), "relu2", fp8=True),
    "FP8 down": Spec(*FP8_TILE, False, False, True, False, 1, (0, 128), fp8=True),
    "FP8 down with adapters": Spec(
        *FP8_TILE, False, False, True, True, 1, (0, 128), bias=torch.float32,
        weight=torch.bfloat16, fp8=True,
    ),
}  # fmt: skip
SHRINKS = {
    "gate and up": ShrinkSpec(BLOCK_M, STAGES, True, 2, 8),
    "up alone": ShrinkSpec(BLOCK_M, STAGES, True, 1, 8),
    "down": ShrinkSpec(BLOCK_M, STAGES, False, 1, 8),
}

needs_compiler = pytest.mark.skipif(
    not compiler.has_compiler(), reason=compiler.why_no_compiler() or ""
)


def check(name: str, source: str, headers: dict[str, str], options: list[str]) -> None:
    """Compile and read what the compiler says about it."""
    code, log = compiler.compile_now(source, headers, [*options, "--ptxas-options=-v"])
    assert code[:4] == b"\x7fELF"
    assert f"Compiling entry function '{name}'" in log, log
    assert not SERIALISED.search(log), log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    assert len(spills) == 2 and max(spills) <= SPILLED_BYTES, log


@needs_compiler
@pytest.mark.parametrize("name", SPECS)
def test_gemms_compile_for_hopper_without_waits_or_spills(name: str) -> None:
    spec = SPECS[name]
    assert spec.shared_bytes <= SHARED_BYTES
    check("moe_gemm", *sources(spec), spec.options())


@needs_compiler
@pytest.mark.parametrize("name", SHRINKS)
def test_shrinks_compile_for_hopper_without_waits_or_spills(name: str) -> None:
    spec = SHRINKS[name]
    assert spec.shared_bytes <= SHARED_BYTES
    check("group_shrink", *sources(spec), spec.options())


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "block_m"),
    [
        *(("moe_gemm", rows) for rows in (16, 176, 192)),
        *(("group_shrink", rows) for rows in (16, 176, 192)),
        *(("moe_gemm of FP8", rows) for rows in (16, 112, 128)),
    ],
)
def test_the_host_gives_as_much_shared_memory_as_the_source_lays_out(
    kernel: str, block_m: int
) -> None:
    """The compiler itself compares; the kernel's body is left away, which takes its time."""
    if kernel != "group_shrink":
        fp8 = kernel == "moe_gemm of FP8"
        gemm = Spec(block_m, 2, False, False, True, False, 1, (0, 128), fp8=fp8)
        (_, headers), options = sources(gemm), gemm.options()
        layout = '#include "moe_gemm_layout.h"'
        end, room = "ROW_SCALES_AT + (FP8 ? STAGES * BLOCK_M * 4 : 0)", gemm.shared_bytes
    else:
        shrink = ShrinkSpec(block_m, 5, False, 1, 1)
        (source, headers), options = sources(shrink), shrink.options()
        layout = source[: source.index("struct Stage ")]
        end, room = "BARRIERS_AT + 16 * STAGES", shrink.shared_bytes
    compiler.compile_now(f"{layout}\nstatic_assert({end} + 1024 == {room});", headers, options)
    with pytest.raises(CompileError, match="static assertion"):
        compiler.compile_now(f"{layout}\nstatic_assert({end} == {room});", headers, options)


GOOD, BAD = (
    'extern "C" __global__ void good() {}',
    "\n\n__global__ void bad() { no_such_name = 1; }",
)
OPTIONS = ["--gpu-architecture=sm_90a"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Give an empty cache, and the sources that were compiled and not found in it."""
    seen: list[str] = []
    real = compiler.compile_now

    def noted(source: str, headers: dict[str, str], options: list[str]) -> tuple[bytes, str]:
        seen.append(source)
        return real(source, headers, options)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_now", noted)
    yield seen


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "moegraft" / "cuda").iterdir())


@needs_compiler
def test_a_kernel_is_compiled_once_per_source_header_and_option(
    compiled: list[str], tmp_path: Path
) -> None:
    code = compiler.cubin(GOOD, {}, OPTIONS)
    assert compiler.cubin(GOOD, {}, OPTIONS) == code
    assert compiled == [GOOD] and len(kept(tmp_path)) == 1
    compiler.cubin(GOOD + "\n", {}, OPTIONS)
    compiler.cubin(GOOD, {"a.h": ""}, OPTIONS)
    compiler.cubin(GOOD, {"a.h": "//"}, OPTIONS)
    compiler.cubin(GOOD, {}, [*OPTIONS, "-DX=1"])
    assert len(compiled) == 5 == len(kept(tmp_path))


@needs_compiler
@pytest.mark.parametrize("damage", ["half", "empty", "another", "longer"])
def test_a_damaged_file_is_compiled_again(damage: str, compiled: list[str], tmp_path: Path) -> None:
    code = compiler.cubin(GOOD, {}, OPTIONS)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    changed = {"half": whole[: len(whole) // 2], "empty": b"", "longer": whole + b"."}
    path.write_bytes(changed.get(damage, whole[:-1] + bytes([whole[-1] ^ 1])))
    assert compiler.cubin(GOOD, {}, OPTIONS) == code
    assert len(compiled) == 2
    assert path.read_bytes() == whole
    compiler.cubin(GOOD, {}, OPTIONS)
    assert len(compiled) == 2


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_used(compiled: list[str], tmp_path: Path) -> None:
    code = compiler.cubin(GOOD, {}, OPTIONS)
    (path,) = kept(tmp_path)
    path.parent.chmod(0o777)
    assert compiler.cubin(GOOD, {}, OPTIONS) == code
    assert compiler.cubin(GOOD, {}, OPTIONS) == code
    assert len(compiled) == 3, "neither read nor written"
    assert kept(tmp_path) == [path]


@needs_compiler
def test_without_a_folder_it_is_compiled_each_time(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert compiler.cubin(GOOD, {}, OPTIONS) == compiler.cubin(GOOD, {}, OPTIONS)
    assert len(compiled) == 2


@needs_compiler
def test_a_source_with_a_mistake_is_an_error_with_its_first_message(
    compiled: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=r'kernel.cu\(3\): error: .*"no_such_name"'):
        compiler.cubin(BAD, {}, OPTIONS)
    assert kept(tmp_path) == []


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Let the library be looked for again, in the test and after it."""
    compiler._library.cache_clear()
    compiler.why_no_compiler.cache_clear()
    yield
    compiler._library.cache_clear()
    compiler.why_no_compiler.cache_clear()


@pytest.mark.parametrize("found", [[], ["/no/such/libnvrtc.so.13"], ["libnvrtc.so.no"]])
def test_without_a_library_there_is_no_compiler_and_a_reason(
    found: list[str], forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_libraries", lambda: iter(found))
    assert not compiler.has_compiler()
    assert "There is no NVRTC" in (compiler.why_no_compiler() or "")
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        compiler.cubin(GOOD, {}, OPTIONS)


@pytest.mark.parametrize(
    ("cuda", "first"), [("12.8", "12"), ("13.0", "13"), (None, "13"), ("14.1", "13")]
)
def test_the_version_that_torch_was_built_for_is_the_first(
    cuda: str | None, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folders of CUDA 13's packages and of CUDA 12's."""
    for folder, version in (("cu13", "13"), ("cuda_nvrtc", "12")):
        path = tmp_path / "nvidia" / folder / "lib" / f"libnvrtc.so.{version}"
        path.parent.mkdir(parents=True)
        path.touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = list(compiler._libraries())
    assert all(Path(name).parent.parent.parent == tmp_path / "nvidia" for name in found[:2])
    assert [name.rpartition(".")[2] for name in found] == 2 * sorted(
        ["12", "13"], key=lambda version: version != first
    )


@needs_compiler
def test_a_library_that_compiles_nothing_is_no_compiler(
    forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one without its built-in functions, or too old for Hopper."""
    monkeypatch.setattr(compiler, "_PROBE", BAD)
    assert not compiler.has_compiler()
    assert "no_such_name" in (compiler.why_no_compiler() or "")
