"""What docs/multi-gpu.md says to copy runs under torchrun, and gives what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std

ROOT = Path(__file__).parents[1]


def torchrun(folder: Path, *command: str) -> list[list[str]]:
    """The lines that each of two ranks prints, into a file of its own: in a pipe they would mix."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = ["--log-dir", str(folder / "logs"), "--redirects", str(Std.OUT.value)]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*run, *logs, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    printed = [next(folder.glob(f"logs/*/attempt_0/{rank}/stdout.log")) for rank in (0, 1)]
    return [path.read_text().splitlines() for path in printed]


def script(number: int, folder: Path) -> str:
    """A Python block of the page, as a file."""
    text = (ROOT / "docs" / "multi-gpu.md").read_text()
    path = folder / "script.py"
    path.write_text(text.split("```python\n")[number + 1].split("```")[0])
    return str(path)


def test_the_layer_of_the_page_runs(tmp_path: Path) -> None:
    assert torchrun(tmp_path, script(1, tmp_path)) == [
        ["rank 0: experts (0, 1, 2, 3, 4), 8.9911"],
        ["rank 1: experts (5, 6, 7, 8, 9), 8.9911"],
    ]


@pytest.mark.slow
def test_the_model_of_the_page_gives_what_one_process_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import moegraft

    lines, others = torchrun(tmp_path, script(0, tmp_path))
    model = AutoModelForCausalLM.from_pretrained(ROOT / "demo" / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo" / "model", padding_side="left")
    graft = moegraft.attach(model)
    for name in ("sql", "kjv"):
        graft.load(name, ROOT / "demo" / "adapters" / name)
    inputs = tokenizer(["SELECT", "And the", "def "], return_tensors="pt", padding=True)
    tokens = graft.generate(
        **inputs, adapters=["sql", "kjv", None], max_new_tokens=20, do_sample=False
    )
    assert lines == [repr(t) for t in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    assert others == []


@pytest.mark.slow
def test_the_script_for_two_gpus_runs_small_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    small = ("--cpu", "--model", "8,64,32,2", "--tokens", "6", "--adapters", "3")
    lines, _ = torchrun(tmp_path, "tests/gpu/parallel_gpu.py", *small, "--out", str(out))
    assert "all results are right" in lines[-1]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["split"] for record in found] == ["EP=2", "EP=2 round robin", "TP=2"]
    assert all(record["one_gpu"]["checked"]["delta_error"] < 0.02 for record in found)
    assert all(record["checked"]["delta_error"] < 0.02 for record in found)


@pytest.mark.slow
def test_the_script_for_models_on_two_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    lines, _ = torchrun(tmp_path, "tests/gpu/parallel_host_gpu.py", "--cpu")
    assert [line.split(":")[0] for line in lines] == ["TP", "TP and EP"]
    assert all("all 6 rows have equal tokens" in line for line in lines)
