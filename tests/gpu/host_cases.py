"""What the GPU tests of hosts share: a small model, its adapters, and both ways to decode."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, StoppingCriteriaList

import moegraft
from moegraft.graphs import GraphRunner, StepRunner
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_bit_equal, random_adapter

NAMES = ("a", "b", "c")
ROWS: list[str | None] = [None, "a", "b", None, "c", "a"]
STEPS = 12


def new_model() -> Any:
    """Two layers of random weights, q and k of different sizes."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return Qwen3MoeForCausalLM(config).to("cuda", torch.bfloat16).eval()


def add(graft: Graft, name: str, rank: int = 8, seed: int = 0, kinds: tuple[str, ...] = ()) -> None:
    """Load an adapter with factors at every site, or at those of some kinds."""
    sites = [site for site in graft.spec.sites if not kinds or site.kind in kinds]
    graft.store.add(name, random_adapter(sites, rank, seed=seed))


def new_graft(**options: Any) -> Graft:
    """Attach to a new model and load :data:`NAMES`, of ranks 4, 16 and 7."""
    graft = moegraft.attach(new_model(), max_adapters=4, max_rank=16, **options)
    for i, name in enumerate(NAMES):
        add(graft, name, rank=(4, 16, 7)[i], seed=i)
    return graft


def prompts(rows: int, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random prompts, padded on the left by 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 256, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 4] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def generate(graft: Graft, rows: list[str | None], seed: int = 0, **options: Any) -> Any:
    """Generate STEPS tokens for each row, with logits."""
    return graft.generate(
        **prompts(len(rows), seed=seed),
        adapters=rows,
        **{
            "max_new_tokens": STEPS,
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_logits": True,
            **options,
        },
    )


def without_graphs(graft: Graft, rows: list[str | None], **options: Any) -> Any:
    """The very same steps on static memory, each run eagerly."""
    graft._use_graphs(StepRunner)
    try:
        return generate(graft, rows, graphs=True, **options)
    finally:
        graft._use_graphs(GraphRunner)


def assert_same(found: Any, expected: Any) -> None:
    """Compare tokens and the bits of logits."""
    assert torch.equal(found.sequences, expected.sequences)
    assert_bit_equal(torch.stack(found.logits), torch.stack(expected.logits), "logits")


def stop_after(count: int) -> StoppingCriteriaList:
    """Stop all rows after some tokens."""

    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= 16 + count
        return torch.full(input_ids.shape[:1], done, device=input_ids.device)

    return StoppingCriteriaList([criterion])
