"""Adapters of all kinds over vLLM's OpenAI HTTP server with the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models import ALL_KINDS, BASE, VOCAB, Models
from server import Server, running_server

TOKENS = 12


@pytest.fixture(scope="module")
def loaded(server: Server, models: Models) -> Iterator[Server]:
    """The server with all adapters, loaded while it runs; no flag says which kind one is."""
    for name in ALL_KINDS:
        answer = server.load(name, models.adapter(name))
        assert answer.status == 200, answer
    yield server
    for name in ALL_KINDS:
        server.unload(name)


def prompts(number: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCAB, (4 + 3 * i,), generator=generator).tolist() for i in range(number)
    ]


def check_all_kinds(server: Server, models: Models) -> None:
    """Ask for four texts of each adapter and the base, all at once, and compare them."""
    jobs = [(name, prompt) for prompt in prompts(4, 1) for name in (BASE, *ALL_KINDS)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: server.complete(*job, TOKENS), jobs))
    assert [answer.status for answer in answers] == [200] * len(jobs)
    wanted = [models.greedy(*job, TOKENS) for job in jobs]
    assert [answer.body for answer in answers] == wanted
    for i in range(0, len(jobs), len(ALL_KINDS) + 1):
        texts = wanted[i : i + len(ALL_KINDS) + 1]
        assert all(text != texts[0] for text in texts[1:]), "an adapter that changes nothing"


def test_all_kinds_in_one_concurrent_load_write_what_the_merged_models_write(
    loaded: Server, models: Models
) -> None:
    check_all_kinds(loaded, models)


def test_the_counters_say_that_moegrafts_layers_ran(loaded: Server) -> None:
    (before,) = loaded.counters()
    assert (before["expert_layers"], before["expert_layers_left"]) == (2, 0)
    assert (before["linear_layers"], before["linear_layers_left"]) == (6, 0)
    assert before["adapters_loaded"] >= len(ALL_KINDS) and before["adapters_completed"] >= 1
    prompt = prompts(1, 2)[0]
    loaded.complete(BASE, prompt, 3)
    (base,) = loaded.counters()
    assert base["expert_calls"] - before["expert_calls"] == 2 * 3
    assert base["expert_calls_with_adapters"] == before["expert_calls_with_adapters"]
    assert base["linear_calls"] == before["linear_calls"]
    loaded.complete("per_expert", prompt, 3)
    (experts,) = loaded.counters()
    assert experts["expert_calls_with_adapters"] - base["expert_calls_with_adapters"] == 2 * 3
    assert experts["linear_calls"] == base["linear_calls"]
    loaded.complete("attention", prompt, 3)
    (attention,) = loaded.counters()
    assert attention["expert_calls_with_adapters"] == experts["expert_calls_with_adapters"]
    assert attention["linear_calls"] - experts["linear_calls"] == 2 * 2 * 3  # qkv and o


def test_adapters_that_lost_their_slot_come_back_to_it(loaded: Server, models: Models) -> None:
    prompt = prompts(1, 3)[0]
    for _ in range(2):  # more adapters than slots, one after the other
        for name in ALL_KINDS:
            assert loaded.complete(name, prompt, 4).body == models.greedy(name, prompt, 4)


def test_an_adapter_is_unloaded_and_another_one_takes_its_name(
    server: Server, models: Models
) -> None:
    prompt = prompts(1, 4)[0]
    assert server.load("guest", models.adapter("half")).status == 200
    assert server.complete("guest", prompt, 4).body == models.greedy("half", prompt, 4)
    assert server.unload("guest").status == 200
    assert server.complete("guest", prompt, 4).status == 404
    assert server.load("guest", models.adapter("shared_outer")).status == 200
    assert server.complete("guest", prompt, 4).body == models.greedy("shared_outer", prompt, 4)
    again = server.load("guest", models.adapter("fused"), load_inplace=True)
    assert again.status == 200, again
    other = prompts(2, 5)[1]  # vLLM keeps cached blocks of a name that is loaded in place
    assert server.complete("guest", other, 4).body == models.greedy("fused", other, 4)
    assert server.unload("guest").status == 200


@pytest.mark.parametrize("experts", [(), ("--enable-expert-parallel",)], ids=["tensor", "expert"])
def test_two_ranks_write_the_same(experts: tuple[str, ...], models: Models, tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "2", *experts)
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("two ranks need two cores")
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"{allowed[0]}|{allowed[1]}"}
    with running_server(models.base, tmp_path / "log.txt", *options, env=cores) as server:
        for name in ALL_KINDS:
            assert server.load(name, models.adapter(name)).status == 200
        check_all_kinds(server, models)
        for counts in server.counters():
            assert counts["expert_calls_with_adapters"] > 0 and counts["linear_calls"] > 0


def test_weights_are_reloaded_under_the_adapters(loaded: Server, models: Models) -> None:
    prompt = prompts(3, 6)[2]
    before = loaded.complete("per_expert", prompt, 4)
    loaded.workers("reload_weights")
    (then,) = loaded.counters()
    loaded.post("/reset_prefix_cache")
    after = loaded.complete("per_expert", prompt, 4)
    assert before.body == after.body == models.greedy("per_expert", prompt, 4)
    (now,) = loaded.counters()
    assert now["expert_calls_with_adapters"] > then["expert_calls_with_adapters"]
