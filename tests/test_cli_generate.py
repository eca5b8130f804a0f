"""``moegraft generate`` on the fixtures' tiny models, with a tokenizer made here."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraft.cli import main, read_options

FIXTURES = Path(__file__).parent / "fixtures"
PEFT = FIXTURES / "peft" / "0.21.2" / "qwen3_moe"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The qwen3_moe fixture with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    for file in (FIXTURES / "models" / "qwen3_moe").iterdir():
        shutil.copy(file, folder)
    names = ["<pad>", "<s>", "</s>", "<unk>", *string.ascii_letters, *" :=.,;?!"]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def arguments(model: Path, *rest: str) -> list[str]:
    """Return a command with two adapters."""
    adapters = ["--adapter", f"all={PEFT / 'experts'}", "--adapter", f"down={PEFT / 'down_only'}"]
    base = ["generate", "--model", str(model), "--dtype", "float32", "--max-new-tokens", "6"]
    return [*base, *adapters, *rest]


def test_every_prompt_gets_its_adapter(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["all:a: long, odd text", "down:Hello", "base:Hello", ":Hello"]
    command = arguments(model, *(part for p in prompts for part in ("--prompt", p)))
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    rows = document["rows"]
    assert [row["adapter"] for row in rows] == ["all", "down", None, None]
    assert rows[0]["prompt"] == "a: long, odd text"
    assert rows[2]["ids"] == rows[3]["ids"] != rows[1]["ids"]
    assert all(1 <= row["new_tokens"] == len(row["ids"]) <= 6 for row in rows)
    assert [row["ids"] for row in rows] == _one_by_one(model, rows)
    assert "Loading weights" not in captured.err and "Warning" not in captured.err

    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.index("[all]\na: long, odd text") < text.index("[down]\nHello")
    assert text.count("[base]\nHello") == 2


def _one_by_one(model: Path, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return what PEFT (or the plain model) writes for each row alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    folders = {"all": PEFT / "experts", "down": PEFT / "down_only"}
    found = []
    for row in rows:
        host: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if row["adapter"] is not None:
            host = PeftModel.from_pretrained(host, str(folders[row["adapter"]])).eval()
        batch = tokenizer(row["prompt"], return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        out = host.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


def test_sampling_repeats_with_its_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sample(seed: str) -> list[int]:
        options = ("--sample", "--temperature", "3", "--top-p", "0.99", "--seed", seed, "--json")
        assert main(arguments(model, "--prompt", "all:Hello", *options)) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["sampling"] == {"temperature": 3.0, "top_p": 0.99, "seed": int(seed)}
        ids: list[int] = document["rows"][0]["ids"]
        return ids

    assert sample("1") == sample("1") != sample("2")


@pytest.mark.parametrize(
    "options",
    [("--temperature", "1e-6", "--seed", str(2**64 - 1)), ("--seed", str(-(2**63)))],
)
def test_the_least_temperature_and_the_outermost_seeds_work(
    model: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert main(arguments(model, "--prompt", "all:Hello", "--sample", *options, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["new_tokens"] > 0


@pytest.mark.parametrize(
    "rest, part",
    [
        (["--prompt", "sql:Hello"], "no adapter 'sql'; loaded: all, down"),
        (["--prompt", "Hello"], "--prompt ':Hello'"),
        (["--prompt", "all:"], "no text"),
        (["--prompt", ":x", "--adapter", "sql"], "not NAME=DIR"),
        (["--prompt", ":x", "--adapter", "=folder"], "not NAME=DIR"),
        (["--prompt", ":x", "--adapter", "base=folder"], "'base' can't be used"),
        (["--prompt", ":x", "--adapter", "a:b=folder"], "colon"),
        (["--prompt", ":x", "--adapter", "all=folder"], "already an adapter 'all'"),
        (["--prompt", ":x", "--adapter", "new=/no/such/folder"], "no adapter at"),
        (["--prompt", ":x", "--adapter", f"new={PEFT / 'modules_to_save'}"], "modules_to_save"),
        (["--prompt", ":x", "--temperature", "0.5"], "--temperature needs --sample"),
        (["--prompt", ":x", "--top-p", "0.5", "--seed", "1"], "--top-p, --seed need --sample"),
        (["--prompt", ":x", "--sample", "--temperature", "0"], "over 0"),
        *(
            (["--prompt", ":x", "--sample", "--temperature", value], "and finite, got")
            for value in ("nan", "inf", "1e-320", "-1")
        ),
        *(
            (["--prompt", ":x", "--sample", "--seed", str(value)], "from -2^63 to 2^64 - 1")
            for value in (2**64, -(2**63) - 1)
        ),
        (["--prompt", ":x", "--sample", "--top-p", "1.5"], "at most 1"),
        (["--prompt", ":x", "--dtype", "int4"], "'--dtype': 'int4' is not one of"),
        (["--prompt", ":x", "--max-new-tokens", "0"], "'--max-new-tokens': "),
        (["--prompt", ":x", "--device", "abacus"], "'abacus' is no torch device"),
        (["--prompt", ":x", "--device", "mps"], "cpu: the tensors are on mps, this"),
        (["--prompt", ":x", "--skip", "("], "skip '(' is not a regular expression"),
        (
            ["--prompt", ":x", "--skip", "sql=x"],
            "no adapter 'sql'; given with --adapter: all, down",
        ),
        (["--prompt", ":x", "--orientation", "upside"], "orientation='upside'"),
        (["--prompt", ":x", "--orientation", "new=normal"], "no adapter 'new'"),
        (["--prompt", ":x", *("--orientation", "normal") * 2], "all adapters already got 'normal'"),
        (["--prompt", ":x", *("--orientation", "all=normal") * 2], "adapter 'all' already got"),
        (["--prompt", ":x", "--model", "/no/such/model"], "no model folder"),
        ([], "--prompt"),
    ],
)
def test_errors(
    model: Path, capsys: pytest.CaptureFixture[str], rest: list[str], part: str
) -> None:
    assert main(arguments(model, *rest, "--json")) == 2
    captured = capsys.readouterr()
    message = json.loads(captured.out)["error"]
    assert part in message
    assert captured.err.splitlines()[-1] == f"error: {message}"


def test_cuda_is_refused_before_anything_is_loaded_and_the_right_thing_is_blamed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def message() -> str:
        command = ["generate", "--model", "/no/such/model", "--prompt", ":x", "--device", "cuda:1"]
        assert main(command) == 2
        return capsys.readouterr().err

    monkeypatch.setattr("moegraft.plan.select.BACKENDS", {"cpu": "moegraft.backends.cpu"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    assert "is built without CUDA" in message()
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "sees no CUDA device" in message()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    refusal = message()
    assert "CUDA" not in refusal and "No backend can run" in refusal and "on cuda" in refusal


def test_read_options_hold_for_all_adapters_or_for_the_one_they_name(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--skip", "lora_bias", "--skip", "down=q_proj", "--orientation", "down=normal"]
    layout = ["--expert-b-layout", "rank_major", "--prompt", "rs:x", "--prompt", "down:x"]
    layout += ["--gate-up-rows", "down=interleaved", "--only", "experts", "--only", "rs=linear"]
    rslora = ["--adapter", f"rs={PEFT / 'rslora'}"]
    assert main(arguments(model, *rslora, *options, *layout, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    common = {"skip": ["lora_bias"], "expert_b_layout": "rank_major", "only": ["experts"]}
    down = {**common, "skip": ["lora_bias", "q_proj"], "orientation": "normal"}
    down["gate_up_rows"] = "interleaved"
    both = {**common, "only": ["experts", "linear"]}
    assert document["read_options"] == {"all": common, "down": down, "rs": both}


def test_parts_of_an_adapter_are_served_alone(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def texts(*only: str) -> list[list[int]]:
        folder = f"a={PEFT / 'all_linear'}"
        wanted = [word for part in only for word in ("--only", part)]
        call = ["generate", "--model", str(model), "--adapter", folder, *wanted, "--json"]
        assert main([*call, "--prompt", "a:hello", "--max-new-tokens", "8"]) == 0
        return [row["ids"] for row in json.loads(capsys.readouterr().out)["rows"]]

    assert texts("experts", "linear", "router") == texts()
    call = ["generate", "--model", str(model), "--prompt", "a:x", "--adapter"]
    assert main([*call, f"a={PEFT / 'all_linear'}", "--only", "a=gates"]) == 2
    assert "only='gates' is no part of a model: experts, linear," in capsys.readouterr().err


def test_read_options_need_an_adapter(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model), "--prompt", ":x", "--skip", "x"]) == 2
    assert "no --adapter is given" in capsys.readouterr().err


def test_an_equals_sign_of_a_regular_expression_is_no_name() -> None:
    found = read_options.per_adapter(["a", "b"], ["x(?=y)", "(?<=z)w", "b=q=r"], [], [])
    assert found["a"].skip == ("x(?=y)", "(?<=z)w")
    assert found["b"].skip == ("x(?=y)", "(?<=z)w", "q=r")


def test_wrong_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = FIXTURES / "peft" / "0.21.2" / "gpt_oss" / "experts"
    assert main(arguments(model, "--adapter", f"new={folder}", "--prompt", "new:x")) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "can't be served" in captured.err


def test_a_model_without_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(FIXTURES / "models" / "qwen3_moe", "--prompt", ":x")) == 2
    message = capsys.readouterr().err
    assert "tokenizer.save_pretrained(" in message and "Loading" not in message


@pytest.mark.parametrize(
    "rest, part",
    [
        (["--adapter", "new=/no/such/folder"], "no adapter at"),
        (["--adapter", f"new={PEFT / 'modules_to_save'}"], "modules_to_save"),
        (["--adapter", f"new={PEFT.parent / 'gpt_oss' / 'experts'}"], "can't be served"),
        (["--model", "/no/such/model"], "no model folder"),
    ],
)
def test_errors_come_before_the_weights_are_read(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rest: list[str],
    part: str,
) -> None:
    monkeypatch.setattr("moegraft.cli.generate.load_model", None)
    assert main(arguments(model, "--prompt", ":x", *rest)) == 2
    message = capsys.readouterr().err
    assert part in message and "Loading" not in message


def test_float16(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(model, "--prompt", "all:Hello", "--dtype", "float16", "--json")
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["dtype"] == "float16" and document["rows"][0]["ids"]


def test_a_skip_pattern_without_a_match_is_a_warning(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skips = ("--skip", "q_prj", "--skip", "down=k_prj", "--skip", "gate_up|q_proj")
    assert main(arguments(model, *skips, "--prompt", "all:x")) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [
        "warning: adapters all, down: skip 'q_prj' matches no tensor's name",
        "warning: adapter down: skip 'k_prj' matches no tensor's name",
    ]
