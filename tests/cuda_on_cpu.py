"""Run a decode kernel's CUDA C++ on the CPU: its source, with cuda_on_cpu.h for instructions."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from moegraft.backends.cuda.fp4_decode import Fp4Spec
from moegraft.backends.cuda.products import SOURCE

COMPILER = shutil.which("g++")
_ENTRY = """
const Arguments *given;
extern "C" void run_all(const Arguments *arguments, int programs) {
    given = arguments;
    body = [] { fp4_decode(*given); };
    for (int i = 0; i < programs; ++i) run_program(i, programs);
}
"""


@cache
def _library(spec: Fp4Spec, early: bool, folder: Path) -> ctypes.CDLL:
    """Compile a specialisation; ``early``: copies happen at once."""
    for path in SOURCE.glob("fp4_*"):
        text = path.read_text() + (_ENTRY if path.suffix == ".cu" else "")
        (folder / path.name).write_text(text)
    header = (Path(__file__).parent / "cuda_on_cpu.h").read_text()
    (folder / "decode.h").write_text(header)
    name = hashlib.sha256(repr((spec, early)).encode()).hexdigest()[:16] + ".so"
    macros = [option for option in spec.options() if option.startswith("-D")]
    limits = [f"-DSHARED_BYTES={spec.shared_bytes}", f"-DEARLY={int(early)}"]
    limits.append(f"-DTHREAD_COUNT={spec.threads}")
    command = [
        str(COMPILER), "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC",
        "-x", "c++", *macros, *limits, "fp4_decode.cu", "-o", name,
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / name))


def run(
    spec: Fp4Spec, arguments: ctypes.Structure, programs: int, folder: Path, early: bool
) -> Any:
    """Run all programs of a launch, one after the other."""
    _library(spec, early, folder).run_all(ctypes.byref(arguments), programs)
