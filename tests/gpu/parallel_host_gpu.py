"""The demo's model sharded over two GPUs by Transformers, against the same on one; run by hand:

NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 tests/gpu/parallel_host_gpu.py

Each rank also holds the whole model, with the same adapters, and compares logits and tokens of a
mixed batch. ``--cpu`` tries the script with gloo.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from two_gpus import joined

import moegraft
from moegraft.hosts.transformers import Graft
from moegraft.testing import relative_error

DEMO = Path(__file__).parents[2] / "demo"
ROWS: list[str | None] = ["sql", None, "kjv", "shakespeare", "sql", None]
PROMPTS = ["SELECT", "def ", "And the", "O Romeo", "INSERT", "import "]
#: Arguments of transformers' DistributedConfig.
MODES: dict[str, dict[str, Any]] = {
    "TP": {"tp_size": 2, "tp_plan": "auto"},
    "TP and EP": {"tp_size": 2, "ep_size": 2, "tp_plan": "auto"},
}
#: fp32 on a GPU may use products of lower precision.
LOGITS_ERROR = 5e-3


def attached(device: torch.device, config: dict[str, Any] | None) -> Graft:
    """The model, whole or sharded, with its adapters."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options: dict[str, Any] = {"dtype": torch.float32}
    if config is not None:
        options["distributed_config"] = DistributedConfig(**config)
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", **options).eval()
    graft = moegraft.attach(model if config is not None else model.to(device))
    for name in sorted({name for name in ROWS if name is not None}):
        graft.load(name, DEMO / "adapters" / name)
    return graft


def compare(whole: Graft, device: torch.device, mode: str) -> str:
    """Compare a sharded model's rows with the whole one's; returns what to print."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model", padding_side="left")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(device)
    graft = attached(device, MODES[mode])
    rows = inputs["attention_mask"].bool()
    found = graft.forward(**inputs, adapters=ROWS).logits[rows]
    expected = whole.forward(**inputs, adapters=ROWS).logits[rows]
    error = relative_error(found, expected)
    assert error < LOGITS_ERROR, f"{mode}: logits differ by {error:.2e}"
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "adapters": ROWS}
    tokens = graft.generate(**inputs, **options)
    wanted = whole.generate(**inputs, **options, graphs=False)
    equal = (tokens == wanted).all(1)
    assert bool(equal.all()), f"{mode}: rows with other tokens: {(~equal).nonzero()[:, 0].tolist()}"
    used = graft.memory.used
    graft.detach()
    return (
        f"{mode}: logits within {error:.1e}, all {len(ROWS)} rows have equal tokens; factors take "
        f"{used:,} bytes per rank, {whole.memory.used:,} on one"
    )


def main() -> None:
    """Compare in every mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="try the script, with gloo")
    with joined(parser.parse_args().cpu) as device:
        whole = attached(device, None)
        for mode in MODES:
            text = compare(whole, device, mode)
            if dist.get_rank() == 0:
                print(text, flush=True)


if __name__ == "__main__":
    main()
