"""Make the demo: a small Mixture-of-Experts model and four LoRA adapters on it.

    python demo/train.py --out demo --cache .cache/demo-data    # train, write, measure
    python demo/train.py --out demo --check                     # only measure what is there

``prompts.json`` is written by hand; the script reads it to print sample continuations.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from corpus import DOMAINS, Split, load_corpus
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

END = "<|endoftext|>"
VOCAB = 1024
SEED = 20
ROWS, LENGTH = 8, 256
BASE_STEPS, BASE_LR = 960, 3e-3
ADAPTER_STEPS, ADAPTER_LR = 240, 4e-3
PASSAGES, PASSAGE_TOKENS = 16, 224
NEW_TOKENS = 48
NEUTRAL_NAME = "moegraft-demo"

console = Console()
Sampler = Callable[[], torch.Tensor]


def train_tokenizer(corpus: dict[str, Split]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on an equal share of each domain."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["".join(corpus[domain].train)[:1_000_000] for domain in DOMAINS]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        model_max_length=1024,
    )


def new_model(end_id: int) -> Qwen3MoeForCausalLM:
    """Return the untrained model: 4 layers of 8 experts, 2 of them active for a token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=160,
        intermediate_size=160,
        moe_intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    return Qwen3MoeForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> torch.Tensor:
    """Return the documents as one token stream, each closed by the end token."""
    ids: list[int] = []
    for row in tokenizer(documents, verbose=False)["input_ids"]:
        ids.extend([*row, tokenizer.eos_token_id])
    return torch.tensor(ids)


def windows(streams: list[torch.Tensor], seed: int) -> Sampler:
    """Return a function that draws a batch of random windows, in equal parts from each stream."""
    rng = random.Random(seed)

    def draw() -> torch.Tensor:
        rows = []
        for index in range(ROWS):
            stream = streams[index % len(streams)]
            start = rng.randrange(len(stream) - LENGTH)
            rows.append(stream[start : start + LENGTH])
        return torch.stack(rows)

    return draw


def fit(
    model: torch.nn.Module, draw: Sampler, steps: int, peak: float, *, balance: bool, label: str
) -> None:
    """Train with AdamW, a short warm-up and a cosine decay.

    Args:
        model: The model; only its parameters that require gradients move.
        draw: Draws one batch of token ids.
        steps: Number of optimizer steps.
        peak: Highest learning rate.
        balance: Add the router's load-balancing loss.
        label: Text in front of the progress bar.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    model.train()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(label, total=steps)
        for _ in range(steps):
            batch = draw()
            out = model(input_ids=batch, labels=batch, output_router_logits=balance)
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            progress.update(task, advance=1, description=f"{label} loss {out.loss.item():.3f}")
    model.eval()


def passages(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[str]:
    """Cut ``PASSAGES`` passages of whole lines, evenly spread over the held-out documents."""
    found: list[str] = []
    for document in documents:
        passage: list[str] = []
        size = 0
        for line in document.splitlines(keepends=True):
            tokens = len(tokenizer(line)["input_ids"])
            if size + tokens > PASSAGE_TOKENS:
                if size > PASSAGE_TOKENS // 2:
                    found.append("".join(passage))
                passage, size = [], 0
            passage.append(line)
            size += tokens
    return [found[index * len(found) // PASSAGES] for index in range(PASSAGES)]


def train_base(corpus: dict[str, Split], out: Path) -> None:
    """Train the tokenizer and the base model on all domains; write both and the held-out text."""
    tokenizer = train_tokenizer(corpus)
    heldout = {domain: passages(tokenizer, corpus[domain].heldout) for domain in DOMAINS}
    (out / "heldout.json").write_text(json.dumps(heldout, indent=1) + "\n", encoding="utf-8")
    torch.manual_seed(SEED)
    model = new_model(tokenizer.eos_token_id)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    streams = [encode(tokenizer, corpus[domain].train) for domain in DOMAINS]
    console.print("training tokens:", dict(zip(DOMAINS, map(len, streams), strict=True)))
    fit(model, windows(streams, SEED), BASE_STEPS, BASE_LR, balance=True, label="base")
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def load_base(out: Path) -> PreTrainedModel:
    """Load the written base model: bfloat16 weights, computed in float32."""
    return AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()


def train_adapter(domain: str, split: Split, out: Path) -> None:
    """Train one domain's adapter on the written base model and save it with PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    seed = SEED + 1 + DOMAINS.index(domain)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load_base(out), config)
    draw = windows([encode(tokenizer, split.train)], seed)
    fit(model, draw, ADAPTER_STEPS, ADAPTER_LR, balance=False, label=domain)
    model.peft_config["default"].base_model_name_or_path = NEUTRAL_NAME
    folder = out / "adapters" / domain
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


@torch.no_grad()
def heldout_loss(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> float:
    """Return the mean next-token loss over all tokens of the passages, in nats."""
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        tokens = ids.shape[1] - 1
        total += model(input_ids=ids, labels=ids).loss.item() * tokens
        count += tokens
    return total / count


@torch.no_grad()
def complete(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return the prompt with its greedy continuation."""
    batch = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def check(out: Path) -> None:
    """Reload everything from the files, print the held-out losses and sample continuations."""
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    heldout = json.loads((out / "heldout.json").read_text(encoding="utf-8"))
    prompts_file = out / "prompts.json"
    prompts = json.loads(prompts_file.read_text(encoding="utf-8")) if prompts_file.exists() else []
    table = Table("adapter", *DOMAINS, title="held-out loss")
    losses: dict[str | None, list[float]] = {}
    for name in (None, *DOMAINS):
        model: torch.nn.Module = load_base(out)
        if name:
            model = PeftModel.from_pretrained(model, str(out / "adapters" / name)).eval()
        losses[name] = [heldout_loss(model, tokenizer, heldout[domain]) for domain in DOMAINS]
        table.add_row(name or "base", *(f"{loss:.3f}" for loss in losses[name]))
        for row in (row for row in prompts if row["adapter"] == name):
            console.rule(name or "base", align="left")
            console.print(complete(model, tokenizer, row["prompt"]), markup=False, highlight=False)
    console.print(table)
    for column, domain in enumerate(DOMAINS):
        best = min(losses, key=lambda name: losses[name][column])
        if best != domain:
            raise SystemExit(f"the {best} model beats the {domain} adapter on its own domain")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to write")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/demo-data"), help="folder of the data archives"
    )
    parser.add_argument("--check", action="store_true", help="only measure what is there")
    parser.add_argument(
        "--only",
        choices=DOMAINS,
        action="append",
        help="train only this adapter, without the final check",
    )
    args = parser.parse_args()
    if not args.check:
        start = time.perf_counter()
        corpus = load_corpus(args.cache, SEED)
        if not args.only:
            train_base(corpus, args.out)
        for domain in args.only or DOMAINS:
            train_adapter(domain, corpus[domain], args.out)
        console.print(f"trained in {time.perf_counter() - start:.0f} s")
    if not args.only:
        check(args.out)


if __name__ == "__main__":
    main()
