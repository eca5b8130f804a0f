"""A tiny model of SGLang's own experts layers under its own LoRA manager, and its formula."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from torch.nn import functional as F
from transformers import Qwen3MoeConfig

from moegraft.hosts.sglang.plugin import register

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, H, WIDTH, K, LAYERS, SLOTS, RANK = 6, 64, 32, 2, 2, 4, 8
HEADS, KV_HEADS, HEAD = 4, 2, 32
#: Leaf of a linear in files -> outputs and inputs.
ATTENTION = {
    "q_proj": (HEADS * HEAD, H),
    "k_proj": (KV_HEADS * HEAD, H),
    "v_proj": (KV_HEADS * HEAD, H),
    "o_proj": (H, HEADS * HEAD),
}
Tensors = dict[str, torch.Tensor]
_PREFIX = "base_model.model.model.layers.{}.mlp.experts"


@contextmanager
def one_process(init: Path) -> Iterator[None]:
    """SGLang's context and groups of one process, and the plugin's hooks."""
    settings: dict[str, Any] = {"enable_lora": True, "moe_runner_backend": "triton"}
    with get_context().override_server_args(device=DEVICE, **settings):
        init_distributed_environment(1, 0, f"file://{init}", 0, backend="gloo")
        initialize_model_parallel()
        get_parallel().override_permanently(moe_ep_rank=0, moe_tp_rank=0, tp_rank=0)
        initialize_moe_config()
        register()
        HookRegistry.apply_hooks()
        yield


class _Layer(torch.nn.Module):
    def __init__(self, experts: FusedMoE, attention: dict[str, Any]) -> None:
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"experts": experts})
        self.self_attn = torch.nn.ModuleDict(attention)


def _attention() -> dict[str, Any]:
    return {
        "qkv_proj": QKVParallelLinear(H, HEAD, HEADS, KV_HEADS, False, params_dtype=torch.float32),
        "o_proj": RowParallelLinear(HEADS * HEAD, H, False, params_dtype=torch.float32),
        "kv_b_proj": ColumnParallelLinear(H, 2 * HEADS * HEAD, False, params_dtype=torch.float32),
    }


class Engine:
    """Model, manager and adapters; ``run`` is what SGLang does with a batch.

    Args:
        root: for the adapters' folders.
        shared_outer: one A of gate and up, and one B of down, for all experts.
        attention: with linears around the experts.
        options: of SGLang's ``FusedMoE``.
    """

    def __init__(
        self, root: Path, shared_outer: bool = False, attention: bool = False, **options: Any
    ) -> None:
        self.root, self.shared_outer, self.adapters = root, shared_outer, dict[str, Tensors]()
        self.gated = bool(options.get("is_gated", True))
        generator = torch.Generator().manual_seed(3)
        layers = []
        for i in range(LAYERS):
            prefix = f"model.layers.{i}.mlp.experts"
            experts = FusedMoE(
                num_experts=E, hidden_size=H, intermediate_size=WIDTH, layer_id=i, top_k=K,
                params_dtype=torch.float32, prefix=prefix, **options,
            )  # fmt: skip
            layers.append(_Layer(experts, _attention() if attention else {}))
            for parameter in layers[-1].parameters():
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.data.copy_(values)
        model = torch.nn.Module()
        model.model = torch.nn.Module()
        model.model.layers = torch.nn.ModuleList(layers)
        config = Qwen3MoeConfig(
            hidden_size=H, moe_intermediate_size=WIDTH, num_experts=E, num_experts_per_tok=K,
            num_hidden_layers=LAYERS, vocab_size=128, num_attention_heads=HEADS, head_dim=HEAD,
            num_key_value_heads=KV_HEADS,
            # The sizes of kv_b_proj.
            kv_lora_rank=H, qk_nope_head_dim=HEAD, v_head_dim=HEAD,
        )  # fmt: skip
        model.config = config  # type: ignore[assignment]
        if not self.gated:  # as models with such experts tell SGLang
            sizes = {"gate_up_proj_moe": (H, WIDTH), "down_proj_moe": (WIDTH, H)}
            model.get_stacked_multiply = lambda name: 1  # type: ignore[assignment]
            model.get_hidden_dim = lambda name, layer: sizes[name]  # type: ignore[assignment]
        self.model = model.to(DEVICE)
        with get_context().config_bag("lora").override(experts_shared_outer_loras=shared_outer):
            self.manager = LoRAManager(
                self.model, config, SLOTS, LoadConfig(), torch.float32, None, "csgmv", RANK,
                ["gate_up_proj", "down_proj", *(_attention() if attention else ())],
            )  # fmt: skip

    def wrapper(self, layer: int = 0) -> Any:
        """SGLang's wrapper of a layer's experts."""
        return self.model.model.layers[layer].mlp["experts"]

    def linear(self, name: str, layer: int = 0) -> Any:
        """SGLang's wrapper of one of a layer's linears."""
        return self.model.model.layers[layer].self_attn[name]

    def ref(self, name: str) -> LoRARef:
        """What SGLang calls an adapter by."""
        return LoRARef(name, name, str(self.root / name), False)

    def add(
        self, name: str, rank: int = RANK, seed: int = 1, experts: Sequence[int] = range(E)
    ) -> None:
        """Write an adapter in PEFT's per-expert layout, and load it."""
        generator = torch.Generator().manual_seed(seed)
        tensors: Tensors = {}
        sides = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        for layer in range(LAYERS):
            prefix = _PREFIX.format(layer)
            one: Tensors = {}
            for e in experts:
                for side, (out, num_in) in {
                    **dict.fromkeys(sides, (WIDTH, H)),
                    "down_proj": (H, WIDTH),
                }.items():
                    a = torch.randn(rank, num_in, generator=generator) * 0.3
                    b = torch.randn(out, rank, generator=generator) * 0.3
                    if self.shared_outer and side != "down_proj":
                        a = one.setdefault(f"{side}.A", a)
                    if self.shared_outer and side == "down_proj":
                        b = one.setdefault(f"{side}.B", b)
                    tensors[f"{prefix}.{e}.{side}.lora_A.weight"] = a
                    tensors[f"{prefix}.{e}.{side}.lora_B.weight"] = b
        self.write(name, tensors, rank, [*sides, "down_proj"])

    def add_attention(self, name: str, rank: int, seed: int) -> None:
        """Write an adapter for q, k, v and o, and load it."""
        generator = torch.Generator().manual_seed(seed)
        tensors: Tensors = {}
        for layer in range(LAYERS):
            prefix = f"base_model.model.model.layers.{layer}.self_attn"
            for leaf, (out, num_in) in ATTENTION.items():
                a = torch.randn(rank, num_in, generator=generator) * 0.3
                tensors[f"{prefix}.{leaf}.lora_A.weight"] = a
                b = torch.randn(out, rank, generator=generator) * 0.3
                tensors[f"{prefix}.{leaf}.lora_B.weight"] = b
        self.write(name, tensors, rank, list(ATTENTION))

    def write(self, name: str, tensors: Tensors, rank: int, targets: list[str]) -> None:
        """Write a folder, alpha twice the rank, and load it."""
        self.adapters[name] = tensors
        folder = self.root / name
        folder.mkdir()
        save_file(self._as_file(tensors), folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
                  "target_modules": targets}  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config))
        result = self.manager.load_lora_adapter(self.ref(name))
        assert result.success, result.error_message

    def _as_file(self, tensors: Tensors) -> Tensors:
        """Stack the experts to ``[E or 1, ..]`` where outer factors are shared.

        SGLang expects the one side of experts without a gate by the name of a gate.
        """
        if not self.gated:
            tensors = {key.replace("up_proj", "gate_proj"): t for key, t in tensors.items()}
        if not self.shared_outer:
            return tensors
        stacked: Tensors = {}
        for layer in range(LAYERS):
            for side in ("gate_proj", "up_proj", "down_proj"):
                for leaf in ("lora_A", "lora_B"):
                    prefix = _PREFIX.format(layer)
                    parts = [tensors[f"{prefix}.{e}.{side}.{leaf}.weight"] for e in range(E)]
                    shared = (side == "down_proj") == (leaf == "lora_B")
                    stacked[f"{prefix}.{side}.{leaf}.weight"] = torch.stack(
                        parts[:1] if shared else parts
                    )
        return stacked

    def prepare(self, names: Sequence[str | None]) -> None:
        """Tell SGLang which adapter each request has; one token each."""
        count = len(names)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=count, lora_ids=list(names),
            input_ids=torch.zeros(count, dtype=torch.long), seq_lens=torch.ones(count),
            req_pool_indices=torch.arange(count), out_cache_loc=torch.arange(count),
            seq_lens_sum=count,
        )  # fmt: skip
        self.manager.fetch_new_loras(set(names))
        self.manager.prepare_lora_batch(batch)

    def run(self, case: Case, layer: int = 0) -> torch.Tensor:
        """One layer's forward pass over a prepared batch."""
        topk = StandardTopKOutput(case.weights, case.ids, torch.empty(0))
        result: torch.Tensor = self.wrapper(layer)(case.x.clone(), topk)
        return result


class Case:
    """Rows and routing, all random; -1 = an expert of another rank.

    Args:
        num_tokens: T.
        top_k: K.
    """

    def __init__(self, num_tokens: int, top_k: int = K) -> None:
        generator = torch.Generator().manual_seed(9)
        self.x = torch.randn(num_tokens, H, generator=generator).to(DEVICE)
        ids = torch.randint(-1, E, (num_tokens, top_k), generator=generator, dtype=torch.int32)
        self.ids = ids.to(DEVICE)
        self.weights = torch.rand(num_tokens, top_k, generator=generator).to(DEVICE)


def activate(options: dict[str, Any], packed: torch.Tensor) -> torch.Tensor:
    """SGLang's activation of one row ``[2I]`` or ``[I]``."""
    name, gated = options.get("activation", "silu"), options.get("is_gated", True)
    if options.get("gemm1_alpha") is not None:
        limit = options["gemm1_clamp_limit"]
        gate, up = packed[::2].clamp(max=limit), packed[1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(options["gemm1_alpha"] * gate) * (up + 1)
    gate, up = packed.chunk(2) if gated else (packed, torch.ones_like(packed))
    if name == "silu":
        return F.silu(gate) * up
    if name == "relu2":
        return F.relu(gate).square()
    return F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def expected(
    engine: Engine, case: Case, names: Sequence[str | None], layer: int = 0, **options: Any
) -> torch.Tensor:
    """SGLang's formula, one pair at a time, in fp64."""
    base = engine.wrapper(layer).base_layer
    w13, w2 = base.w13_weight.double().cpu(), base.w2_weight.double().cpu()
    out = torch.zeros(case.x.shape, dtype=torch.float64)
    for t, name in enumerate(names):
        for k in range(case.ids.shape[1]):
            e = int(case.ids[t, k])
            if e < 0:
                continue
            x = case.x[t].double().cpu()
            delta13, delta2 = _deltas(engine, name, layer, e, options)
            h = activate(options, w13[e] @ x + delta13 @ x)
            out[t] += float(case.weights[t, k]) * (w2[e] @ h + delta2 @ h)
    return out * (options.get("routed_scaling_factor") or 1.0)


def _deltas(
    engine: Engine, name: str | None, layer: int, e: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = engine.adapters.get(name or "", {})

    def product(side: str) -> torch.Tensor:
        key = f"{_PREFIX.format(layer)}.{e}.{side}"
        if f"{key}.lora_A.weight" not in tensors:
            shape = (H, WIDTH) if side == "down_proj" else (WIDTH, H)
            return torch.zeros(shape, dtype=torch.float64)
        a, b = (tensors[f"{key}.{leaf}.weight"].double() for leaf in ("lora_A", "lora_B"))
        return 2.0 * b @ a  # alpha is twice the rank

    if not engine.gated:
        return product("up_proj"), product("down_proj")
    gate, up = product("gate_proj"), product("up_proj")
    if options.get("gemm1_alpha") is not None:
        return torch.stack([gate, up], 1).flatten(0, 1), product("down_proj")
    return torch.cat([gate, up]), product("down_proj")


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error."""
    return float((found.double().cpu() - wanted).norm() / wanted.norm())
