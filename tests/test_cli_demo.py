"""``moegraft demo`` on a small stand-in, and its parts that the real demo rarely reaches."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from moegraft.cli import demo_view, main
from moegraft.demo import speed, threads
from moegraft.demo.batch import Batch, BatchStreamer
from moegraft.demo.compare import compare_rows
from moegraft.demo.files import Prompt, find_demo
from moegraft.errors import MoegraftError

ADAPTERS = ("python", "sql")
ROWS = (
    ("python", "def main():"),
    (None, "def main():"),
    ("sql", "SELECT name"),
    ("python", "import"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread (tiny models are fastest so), and no more timed runs than needed."""
    monkeypatch.setattr(speed, "_BUDGET", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like ``demo/``: a random model, two adapters by PEFT, prompts, passages."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    out = tmp_path_factory.mktemp("demo")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=_save_tokenizer(out / "model"),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(out / "model")
    for name in ADAPTERS:
        lora = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
        host = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        get_peft_model(host, lora).save_pretrained(out / "adapters" / name)
    prompts = [{"adapter": adapter, "prompt": text} for adapter, text in ROWS]
    (out / "prompts.json").write_text(json.dumps(prompts))
    heldout = {"python": ["def f():\n    pass\n" * n for n in (1, 3)], "sql": ["SELECT 1;", "X"]}
    (out / "heldout.json").write_text(json.dumps(heldout))
    return out


def _save_tokenizer(folder: Path) -> int:
    """Write a tokenizer of single bytes; return the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    return len(letters)


def run(folder: Path, *rest: str) -> int:
    paths = ["--model", str(folder / "model"), "--adapters", str(folder / "adapters")]
    return main(["demo", *paths, "--max-new-tokens", "5", *rest])


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [(row["adapter"], row["prompt"]) for row in document["rows"]] == list(ROWS)
    assert document["same_as_peft"] is True
    assert all(row["check"]["same"] and row["check"]["tokens"] == 5 for row in document["rows"])
    losses = document["heldout_loss"]
    assert set(losses) == {"base", *ADAPTERS} and set(losses["sql"]) == {"python", "sql"}
    assert losses["base"]["python"] == pytest.approx(_loss(folder, None), rel=1e-4)
    assert losses["sql"]["python"] == pytest.approx(_loss(folder, "sql"), rel=1e-4)
    found = document["speed"]
    assert found["repeats"] >= 3
    for name in ("mixed", "peft", "base"):
        assert found[name]["tokens_per_second"] == pytest.approx(20 / found[name]["seconds"])
    ratio = found["mixed"]["tokens_per_second"] / found["peft"]["tokens_per_second"]
    assert found["mixed_over_peft"] == pytest.approx(ratio)
    assert "Loading weights" not in captured.err


@torch.no_grad()
def _loss(folder: Path, adapter: str | None) -> float:
    """Return PEFT's mean loss per token over the python passages, one at a time."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(folder / "adapters" / adapter))
    total, count = 0.0, 0
    for text in json.loads((folder / "heldout.json").read_text())["python"]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        total += model.eval()(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def test_piped_output_is_plain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--no-check") == 0
    captured = capsys.readouterr()
    for name in ("python", "base"):
        assert f"[{name}] after 'def main():':" in captured.out
    assert "\x1b" not in captured.out + captured.err
    assert "identical" not in captured.out and "not compared" in captured.out
    assert "tokens/s" in captured.out and "Held-out loss" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80


def test_a_difference_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed_up(batch: Batch, new_ids: torch.Tensor, *rest: Any) -> Any:
        wrong = new_ids.clone()
        wrong[2, 3] = (wrong[2, 3] + 1) % 200
        return compare_rows(batch, wrong, *rest)

    monkeypatch.setattr("moegraft.demo.compare.compare_rows", mixed_up)
    assert run(folder) == 1
    text = capsys.readouterr().out
    assert re.search(r"row 3 sql .*differs from new token 3 on", text)
    assert "3 of 4 rows identical" in text and "differ from PEFT" in text


def test_live_table_fits_the_terminal() -> None:
    prompts = [Prompt("a" * 11, "one\ntwo " * 9), Prompt(None, "three")] * 4
    # Two terminals of one size: the live one's own thread draws whenever it likes.
    live_on, paper = (
        Console(width=80, height=24, force_terminal=True, file=io.StringIO()) for _ in range(2)
    )
    with demo_view.LiveRows(live_on, prompts) as live:
        live.show(["word " * 99] * 8)
        with paper.capture() as capture:
            paper.print(live._live.get_renderable())
    assert len(capture.get().splitlines()) <= 24


def test_threads_are_chosen_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    batch = Batch((None,), torch.zeros(1, 1), torch.ones(1, 1), 0)
    for slow in (1, 2):
        monkeypatch.setattr(
            threads, "_seconds", lambda *_, slow=slow: float(torch.get_num_threads() == slow)
        )
        with threads.best_threads(None, batch) as chosen:
            assert chosen == torch.get_num_threads() == 3 - slow
        assert torch.get_num_threads() == 2


def test_streamer_collects_rows() -> None:
    seen: list[list[list[int]]] = []
    streamer = BatchStreamer(lambda rows: seen.append([list(row) for row in rows]))
    streamer.put(torch.zeros(2, 3, dtype=torch.int64))
    streamer.put(torch.tensor([4, 5]))
    streamer.put(torch.tensor([6, 7]))
    streamer.end()
    assert seen == [[[4], [5]], [[4, 6], [5, 7]]]


def test_find_demo(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    files = find_demo()
    assert list(files.adapters) == list(ADAPTERS) and len(files.prompts) == 4
    assert files.model == Path("demo/model")
    with pytest.raises(MoegraftError, match=r"that are not there: [^\[]*sql\. --adapters"):
        find_demo(folder / "model", tmp_path)


def test_missing_demo_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moegraft.demo.files.__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    assert main(["demo", "--json"]) == 2
    assert "clone" in json.loads(capsys.readouterr().out)["error"]


def test_a_missing_model_is_said_before_loading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--model", str(folder / "none"), "--adapters", str(folder / "adapters")]
    assert main(["demo", *paths]) == 2
    message = capsys.readouterr().err
    assert "no model folder" in message and "Loading" not in message


@pytest.mark.parametrize(
    "content",
    [
        *("[", "[]", '[{"adapter": null}]'),
        *(
            json.dumps([{"adapter": name, "prompt": "x"}])
            for name in ("..", "../adapters/sql", "/etc", "", 3, ["sql"])
        ),
    ],
)
def test_bad_prompts(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "prompts.json").write_text(content)
    (tmp_path / "heldout.json").write_text("{}")
    with pytest.raises(MoegraftError, match=r"prompts\.json"):
        find_demo(tmp_path / "model", folder / "adapters")
