"""Models that transformers shards over two gloo ranks: rows equal merged models in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import parallel_hosts as hosts
import parallel_refusals as refusals
from ranks import shared


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    found = tmp_path_factory.mktemp("model")
    hosts.save_model(found)
    return found


@pytest.mark.parametrize("mode", hosts.MODES)
def test_rows_of_a_sharded_model_equal_merged_models_in_one_process(
    folder: Path, mode: str
) -> None:
    first, second = shared(2).run(hosts.rows_equal_merged, folder, mode)
    whole = hosts.whole_sizes(folder)
    for name, num_bytes in whole.items():
        assert max(first[name], second[name]) <= num_bytes
    assert first["down"] + second["down"] < 2 * whole["down"], "experts are sliced"
    if "ep" in mode:
        assert first["half"] == whole["half"] and second["half"] == 0, "experts 0 and 1 are here"
    if "replicated" in mode:
        assert first["attention"] == second["attention"] == whole["attention"]
    else:
        assert first["attention"] < whole["attention"]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("shared_expert", "tp"),
        ("shared_expert", "tp and ep"),
        ("sigmoid_routing", "tp"),
        ("clamped", "tp and ep"),
        ("custom_activation", "tp"),
        ("not_gated", "tp and ep"),
        ("latent_experts", "tp and ep"),
        ("gpt_oss", "tp and ep"),  # biases, interleaved, attention sinks
    ],
)
def test_families_of_models_equal_merged_models(tmp_path: Path, family: str, mode: str) -> None:
    hosts.save_family(tmp_path, family)
    shared(2).run(hosts.family_equals_merged, tmp_path, mode)


@pytest.mark.parametrize("mode", ["tp and ep", "tp"])
def test_gradients_are_refused_with_adapters_only(folder: Path, mode: str) -> None:
    shared(2).run(refusals.gradients_are_refused, folder, mode)


def test_modes_that_would_lose_a_rows_adapter_are_refused_by_name(folder: Path) -> None:
    for messages in shared(2).run(refusals.refused_modes, folder):
        by_mode = dict(messages)
        assert "moves rows between ranks" in by_mode["all_to_all"]
        assert "AllToAllEP" in by_mode["all_to_all"] and "all_reduce" in by_mode["all_to_all"]
        assert "different batches" in by_mode["fsdp"]
        assert "2 pipeline stages" in by_mode["pp"]
        assert "a router that is sharded" in by_mode["router"]
        assert "is sharded, and how its forward" in by_mode["a foreign forward"]
        assert "none of its parameters is a DTensor" in by_mode["plain slices"]


def test_what_is_sharded_decodes_without_graphs(folder: Path) -> None:
    shared(2).run(refusals.no_static_decoding, folder)


@pytest.mark.parametrize("mode", ["tp", "tp and ep"])
def test_what_is_not_sliced_is_refused_by_name(folder: Path, mode: str) -> None:
    shared(2).run(refusals.vectors_are_refused, folder, mode)


def test_a_batch_that_one_rank_can_not_run_is_refused_on_all(folder: Path) -> None:
    first, second = shared(2).run(refusals.ranks_that_differ, folder)
    assert "no adapter 'half'" in first[0]
    assert "Rank 0 can't run this batch, so no rank does" in second[0]
    assert "no adapter 'half'" in second[0]
    assert "all ranks must run the same batch" in first[1]
    assert "all ranks must run the same batch" in second[1]
    assert "so no rank does" in second[2] and first[2] in second[2]


def test_a_rank_that_fails_in_any_way_leaves_no_other_waiting() -> None:
    first, second = shared(2).run(refusals.a_rank_that_fails)
    assert second.startswith("RuntimeError: ")
    assert first.startswith("MoegraftError: Rank 1 can't run this batch, so no rank does")
    assert first.endswith(f"It says: {second}")
