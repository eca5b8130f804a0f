"""The waits inside the fused kernels while others hold most of the GPU: no hang, no wrong bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = Path(__file__).parent / "waits_stress.py"
#: The stress takes some twenty seconds; a program that waits for ever is ended with its process.
TIME_LIMIT = 100


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_ten_thousand_layers_on_a_busy_gpu_neither_hang_nor_err() -> None:
    paths = [str(SCRIPT.parent), str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"a program waited for ever, or the GPU is shared: {error}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok: " in done.stdout
