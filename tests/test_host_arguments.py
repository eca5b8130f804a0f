"""Arguments of a graft that are of another type or mean nothing: refused by name, nothing done."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import moegraft
import tiny
from moegraft import AdapterError, FilePolicy, MoegraftError, UnsupportedError
from moegraft.hosts.transformers import Graft
from test_host_lifecycle import A
from tiny_grafts import new_graft, prompts

MODEL = "qwen3_moe"


@pytest.fixture
def graft() -> Iterator[Graft]:
    """A fresh graft with one adapter."""
    graft = new_graft(MODEL, max_adapters=2)
    graft.load(A, tiny.folder(A))
    yield graft
    graft.detach()


TENSORS, CONFIG = tiny.tensors_of(A), tiny.config_of(A)
Call = Callable[[Any], Any]
CALLS: dict[str, tuple[Call, str]] = {
    "load: no path": (lambda g: g.load("x", None), "None is no path of an adapter"),
    "load: a number": (lambda g: g.load("x", 3), "3 is no path of an adapter"),
    "load: a name of bytes": (lambda g: g.load(b"x", tiny.folder(A)), "is not an adapter name"),
    "load: options": (lambda g: g.load("x", tiny.folder(A), "skip"), "no moegraft.ReadOptions"),
    "load: a dict of options": (
        lambda g: g.load("x", tiny.folder(A), {"skip": ()}),
        "no moegraft.ReadOptions",
    ),
    "check: no path": (lambda g: g.check(None), "no path of an adapter"),
    "memory_estimate": (lambda g: g.memory_estimate(TENSORS), "no path of an adapter"),
    "load_tensors: a path": (
        lambda g: g.load_tensors("x", tiny.folder(A), CONFIG),
        "is no mapping of names to tensors",
    ),
    "load_tensors: pairs": (
        lambda g: g.load_tensors("x", list(TENSORS.items()), CONFIG),
        "is no mapping of names to tensors",
    ),
    "load_tensors: a list for a tensor": (
        lambda g: g.load_tensors("x", {**TENSORS, next(iter(TENSORS)): [[1.0]]}, CONFIG),
        r"is \[\[1.0\]\], not a tensor",
    ),
    "load_tensors: a number for a name": (
        lambda g: g.load_tensors("x", {**TENSORS, 3: torch.ones(1)}, CONFIG),
        "holds a tensor named 3",
    ),
    "load_tensors: a sparse tensor": (
        lambda g: g.load_tensors("x", {k: v.to_sparse() for k, v in TENSORS.items()}, CONFIG),
        "is no dense tensor",
    ),
    "load_tensors: a tensor without memory": (
        lambda g: g.load_tensors("x", {k: v.to("meta") for k, v in TENSORS.items()}, CONFIG),
        "is on meta",
    ),
    "load_tensors: a config path": (
        lambda g: g.load_tensors("x", TENSORS, "adapter_config.json"),
        "is no mapping",
    ),
    "load_tensors: a config within itself": (
        lambda g: g.load_tensors("x", TENSORS, endless()),
        "nests deeper than 32 levels",
    ),
    "load_tensors: a deep config": (
        lambda g: g.load_tensors("x", TENSORS, {**CONFIG, "x": deep(900)}),
        "nests deeper than 32 levels",
    ),
    "load_tensors: a huge number": (
        lambda g: g.load_tensors("x", TENSORS, {**CONFIG, "r": 10**5000}),
        "r=a int too large to show is out of range",
    ),
    "update: a list": (lambda g: g.update(A, [1]), "is no mapping of names to tensors"),
    "update: no name": (
        lambda g: g.update(["a"], TENSORS),
        r"\['a'\] is not an adapter|There is no adapter \['a'\]",
    ),
    "update: a config": (lambda g: g.update(A, TENSORS, 7), "the config 7 is no mapping"),
    "unload: no name": (lambda g: g.unload([]), r"\[\] is not an adapter|There is no adapter \[\]"),
    "pin: no name": (lambda g: g.pin({}), "There is no adapter"),
    "decoder: text": (lambda g: g.decoder("a", 64), "whole numbers .*; got batch_size='a'"),
    "decoder: a fraction": (lambda g: g.decoder(1, 2.5), "max_length=2.5"),
    "decoder: no memory": (
        lambda g: g.decoder(10**9, 10**6),
        "no memory for a decoder of 1,000,000,000 rows of 1,000,000 tokens",
    ),
    "load: an endless name": (
        lambda g: g.load("a" * 10**6, tiny.folder(A)),
        r"'a{80}\.\.\.' is not",
    ),
    "rows: a huge number": (lambda g: g.rows(None, 10**13).__enter__(), "is no number of rows"),
    "decoder: graphs": (lambda g: g.decoder(1, 8, graphs="yes"), "graphs='yes' is not True"),
    "decoder: a list": (lambda g: g.decoder(1, 8).prefill([[1, 2]]), "must be token ids, int64"),
    "decoder: one dimension": (
        lambda g: g.decoder(1, 8).prefill(torch.tensor([1, 2])),
        r"int64 \[rows, tokens\]; got torch.int64 \(2,\)",
    ),
    "decoder: fractions": (lambda g: g.decoder(1, 8).prefill(torch.ones(1, 2)), "torch.float32"),
    "decoder: a mask": (
        lambda g: g.decoder(1, 8).prefill(torch.ones(1, 2).long(), None, torch.ones(1, 3)),
        r"attention mask is torch.float32 \(1, 3\)",
    ),
    "decoder: a token": (lambda g: started(g).step(5), r"tokens must be token ids, int64 \[rows\]"),
    "decoder: tokens": (
        lambda g: started(g).step(torch.tensor([5, 6])),
        "2 tokens were given for 1 rows",
    ),
    "decoder: steps": (lambda g: started(g).run(1.5), "num_steps=1.5 is no number"),
    "generate: graphs": (lambda g: g.generate(**prompts(1), graphs=1), "graphs=1 is not True"),
    "rows: text": (lambda g: g.rows(A, "2").__enter__(), "num_rows='2' is no number of rows"),
    "forward: a dict": (lambda g: g.forward(**prompts(1), adapters={A: 1}), "no list of names"),
    "store.use": (lambda g: g.store.use([1, A]).__enter__(), "is no list of adapter names"),
}


def endless() -> dict[str, Any]:
    """A config that holds itself."""
    config: dict[str, Any] = dict(CONFIG)
    config["self"] = config
    return config


def deep(levels: int) -> list[Any]:
    """Lists within lists."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def started(graft: Any) -> Any:
    """A decoder with a batch of one row."""
    decoder = graft.decoder(1, 8)
    decoder.prefill(torch.tensor([[5, 6]]))
    return decoder


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_an_argument_of_another_type_is_refused_by_name(
    graft: Graft, call: Call, message: str
) -> None:
    before = graft.adapters
    with pytest.raises(MoegraftError, match=message) as caught:
        call(graft)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert graft.adapters == before


def test_a_decoder_goes_on_after_an_argument_was_refused(graft: Graft) -> None:
    decoder = graft.decoder(1, 8)
    first = decoder.prefill(torch.tensor([[5, 6]]), [A]).clone()
    for call in (
        lambda: decoder.prefill([[1]]),
        lambda: decoder.step("x"),
        lambda: decoder.run(-1),
    ):
        with pytest.raises(MoegraftError):
            call()
    assert decoder.tokens[:, -1:].tolist() == [first.tolist()]
    assert decoder.run(2).shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse_linears": "x"}, "fuse_linears='x' is no bool"),
        ({"backend": 3}, "backend=3 is no str"),
        ({"backend": "cuda"}, "cuda"),
        ({"arena_bytes": "1GB"}, "arena_bytes='1GB' is no number of bytes"),
        ({"arena_bytes": 1e9}, "arena_bytes=1000000000.0 is no number of bytes"),
        ({"max_adapters": "8"}, "num_slots='8'"),
        ({"max_rank": 0}, "max_rank=0"),
        ({"max_adapters": True}, "num_slots=True"),
        ({"max_adapters": 10**30}, r"in whole numbers below 2\^31"),
        ({"arena_bytes": 10**30}, "is no number of bytes"),
        ({"arena_bytes": 10**16}, "no memory for an arena of 10,000,000,000,000,000 bytes"),
        ({"file_policy": "/srv/adapters"}, "file_policy='/srv/adapters' is no FilePolicy"),
    ],
)
def test_attach_refuses_arguments_of_other_types(options: dict[str, Any], message: str) -> None:
    model = tiny.new_model(MODEL)
    with pytest.raises(MoegraftError, match=message):
        moegraft.attach(model, **options)
    assert not [key for m in model.modules() for key in vars(m) if "moegraft" in key]


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3", {}, torch.nn.Linear(2, 2)])
def test_attach_refuses_what_is_no_model(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="takes a transformers PreTrainedModel"):
        moegraft.attach(model)
    with pytest.raises(UnsupportedError, match="takes a transformers PreTrainedModel"):
        moegraft.attach(type(tiny.base_model(MODEL)))


def test_a_part_of_a_distributed_tensor_is_refused_by_name(graft: Graft) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = {k: distribute_tensor(t, mesh, [Shard(0)]) for k, t in TENSORS.items()}
        with pytest.raises(AdapterError, match=r"is a DTensor, .* give its full_tensor\(\)"):
            graft.load_tensors("x", parts, CONFIG)
        whole = {key: tensor.full_tensor() for key, tensor in parts.items()}
        assert graft.load_tensors("x", whole, CONFIG).checksum == graft.store.info(A).checksum
    finally:
        torch.distributed.destroy_process_group()


def test_every_way_to_a_file_is_held_to_the_grafts_policy(tmp_path: Path) -> None:
    inside, outside = tmp_path / "adapters" / "a", tmp_path / "a"
    for folder in (inside, outside):
        shutil.copytree(tiny.folder(A), folder)
    policy = FilePolicy(root=tmp_path / "adapters")
    graft: Any = new_graft(MODEL, file_policy=policy)
    for read in (lambda p: graft.load("x", p), graft.check, graft.memory_estimate):
        read(inside)
        for path in (outside, f"{inside}/../../a", tmp_path / "adapters" / ".." / "a"):
            with pytest.raises(AdapterError, match="outside of the folder"):
                read(path)
    graft.detach()
    small: Any = new_graft(MODEL, file_policy=FilePolicy(max_bytes=100))
    with pytest.raises(AdapterError, match=r"over the limit of 100 \(FilePolicy"):
        small.load("x", inside)
    small.detach()
