"""A whole transformers model with random weights and random adapters, made on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from moegraft.bench.cases import blank_factors, draw_factors
from moegraft.errors import MoegraftError
from moegraft.sites import Site
from moegraft.testing.adapters import bound_adapter
from moegraft.types import LoraFactor, SiteFactors

#: Standard deviation of all weight matrices. With normalised inputs every projection then stays
#: near size 1, and logits within a few units.
_STD = 0.02
#: Linears that get factors, beside the experts.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class WholeModel:
    """Sizes of a Qwen3-MoE model.

    Example: the default is Qwen3-30B-A3B: 48 layers, 30.5 billion parameters, 61 GB in bf16.
    """

    layers: int = 48
    hidden: int = 2048
    intermediate: int = 768
    num_experts: int = 128
    top_k: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151936

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in bf16, norms left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        experts = 3 * self.num_experts * self.hidden * self.intermediate
        layer = attention + experts + self.num_experts * self.hidden
        return 2 * (self.layers * layer + 2 * self.vocabulary * self.hidden)

    def config(self) -> Any:
        """Return the transformers config."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            moe_intermediate_size=self.intermediate,
            num_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=32768,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


def random_model(shape: WholeModel, device: torch.device, seed: int = 0) -> Any:
    """Build a bf16 model whose parameters are allocated and drawn on ``device``, never elsewhere.

    Raises:
        MoegraftError: transformers is missing, or the GPU has too little free memory.
    """
    try:
        from transformers import Qwen3MoeForCausalLM
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise MoegraftError(
            f"`bench e2e` needs transformers >= 5.17: pip install -e '.[transformers]' in the "
            f"clone of moegraft ({error})."
        ) from error
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if shape.weight_bytes > 0.9 * free:
            raise MoegraftError(
                f"The model takes {shape.weight_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: "
                f"lower --layers (now {shape.layers})."
            )
    config = shape.config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), no_init_weights():
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _STD, generator=generator)
            else:
                parameter.fill_(1.0)
    return model.eval()


def load_random_adapters(
    graft: Any, names: Sequence[str], rank: int, say: Callable[[str], None] = lambda text: None
) -> int:
    """Load adapters for the experts and attention of every layer; returns bytes per adapter.

    They go through the store and into slots as any adapter does, as zeros; the values are then
    drawn in the slots, which are pinned so that no adapter is loaded again.
    """
    factors = {
        site.name: _blank(site, rank)
        for site in graft.spec.sites
        if site.kind == "experts" or site.name.rpartition(".")[2] in TARGETS
    }
    say(f"loading {len(names)} adapters of rank {rank} at {len(factors)} places")
    with ThreadPoolExecutor(len(names)) as pool:
        infos = list(pool.map(lambda name: graft.store.add(name, bound_adapter(factors)), names))
    num_bytes: int = infos[0].num_bytes
    graft.bank.reserve(len(names) * num_bytes)
    generator = torch.Generator(graft.bank.device).manual_seed(len(names))
    with graft.store.use(names) as slots:
        for name in names:
            graft.pin(name)
        for site in factors:
            table = graft.bank.site_table(site)
            for slot in slots.values():
                draw_factors(table, slot, generator, size=0.3)
        table.arena.version += 1  # host-side backends decode the table again
    return num_bytes


def _blank(site: Site, rank: int) -> SiteFactors:
    if site.kind == "experts":
        return blank_factors(site, rank, "separate")
    zero, linear = torch.zeros(1, dtype=torch.bfloat16), site.projections[0]
    lora_a = zero.expand(1, rank, linear.in_features)
    return SiteFactors(
        {linear.name: LoraFactor(lora_a, zero.expand(1, linear.out_features, rank), 2.0)}
    )
