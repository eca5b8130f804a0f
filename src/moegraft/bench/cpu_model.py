"""``bench cpu``: a small MoE model's decode with eight adapters, against PEFT one by one."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moegraft.bench.cpu_turns import in_turns
from moegraft.bench.records import Record
from moegraft.errors import MoegraftError
from moegraft.testing import relative_error

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_PROMPT = 8
#: Largest difference of a row's logits to PEFT's.
_AGREE = 1e-3


@dataclass(frozen=True)
class SmallModel:
    """Sizes of the model and what it runs, fp32.

    Attributes:
        adapters: one row each.
        steps: decode steps that are timed.
    """

    layers: int = 4
    hidden: int = 512
    intermediate: int = 256
    num_experts: int = 32
    top_k: int = 4
    vocabulary: int = 4096
    adapters: int = 8
    rank: int = 16
    steps: int = 8


def run_model(shape: SmallModel, turns: int, seconds: float, say: Callable[[str], None]) -> Record:
    """Measure decode steps: one mixed batch, the base, and PEFT adapter by adapter.

    Raises:
        MoegraftError: no transformers or PEFT, or logits that differ from PEFT's.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError as error:
        raise MoegraftError(
            "The model part of `bench cpu` needs transformers and PEFT: pip install -e '.[demo]' "
            f"in the clone of moegraft, or pass --no-model ({error})."
        ) from error
    import moegraft

    say(f"a model of {shape.layers} layers with {shape.adapters} adapters")
    config = Qwen3MoeConfig(
        num_hidden_layers=shape.layers, hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden, moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts, num_experts_per_tok=shape.top_k, num_attention_heads=8,
        num_key_value_heads=4, head_dim=max(shape.hidden // 8, 8), vocab_size=shape.vocabulary,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    lora = LoraConfig(
        r=shape.rank, lora_alpha=shape.rank, target_modules=_TARGETS, target_parameters=_EXPERTS,
        init_lora_weights=False,
    )  # fmt: skip
    alone = [
        get_peft_model(copy.deepcopy(base), lora).eval().requires_grad_(False)
        for _ in range(shape.adapters)
    ]
    names = [f"a{i}" for i in range(shape.adapters)]
    graft = moegraft.attach(copy.deepcopy(base), max_adapters=shape.adapters)
    with tempfile.TemporaryDirectory() as folder:
        for name, model in zip(names, alone, strict=True):
            model.save_pretrained(str(Path(folder) / name))
            graft.load(name, str(Path(folder) / name))
    prompts = torch.randint(1, shape.vocabulary, (shape.adapters, _PROMPT))
    _check_logits(graft, alone, names, prompts)

    def mixed(new: int) -> Callable[[], Any]:
        return lambda: graft.generate(**_arguments(prompts, new), adapters=names)

    def bare(new: int) -> Callable[[], Any]:
        return lambda: base.generate(**_arguments(prompts, new))

    def one_by_one(new: int) -> Callable[[], Any]:
        parts = [_arguments(prompts[i : i + 1], new) for i in range(shape.adapters)]
        return lambda: [m.generate(**part) for m, part in zip(alone, parts, strict=True)]

    kinds = {"mixed": mixed, "base": bare, "peft": one_by_one}
    ways = {
        f"{name} {new}": make(new) for name, make in kinds.items() for new in (1, 1 + shape.steps)
    }
    with torch.no_grad():
        spent = in_turns(ways, turns, seconds)
    steps = {}
    for name in kinds:
        long, short = spent[f"{name} {1 + shape.steps}"], spent[f"{name} 1"]
        steps[name] = {
            "us": (long.median - short.median) / shape.steps * 1e6,
            "us_least": (long.least - short.least) / shape.steps * 1e6,
        }
    return {"part": "model", "shape": asdict(shape), "dtype": "float32", "ways": steps}


def _arguments(prompts: torch.Tensor, new: int) -> dict[str, Any]:
    return {
        "input_ids": prompts, "attention_mask": torch.ones_like(prompts), "max_new_tokens": new,
        "min_new_tokens": new, "do_sample": False,
    }  # fmt: skip


@torch.no_grad()
def _check_logits(graft: Any, alone: list[Any], names: list[str], prompts: torch.Tensor) -> None:
    found = graft.forward(input_ids=prompts, adapters=names).logits
    for i, model in enumerate(alone):
        error = relative_error(found[i : i + 1], model(input_ids=prompts[i : i + 1]).logits)
        if not error <= _AGREE:
            raise MoegraftError(
                f"Row {i} differs from PEFT's by {error:.2g}, at most {_AGREE:g} is right: this is "
                "a fault, nothing was timed."
            )
