"""All GPU kernels compile ahead of time, for cards that this machine need not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [90, 100])
def test_every_kernel_compiles_for(capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "aot_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "linear_lora" in done.stdout
