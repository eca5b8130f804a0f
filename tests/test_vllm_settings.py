"""When the vLLM plugin acts: the part that needs no vLLM. The rest is in tests/vllm_plugin."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from moegraft.env import vllm_linears
from moegraft.errors import AdapterError, MoegraftError
from moegraft.hosts.vllm import counters
from moegraft.hosts.vllm.answers import our_words
from moegraft.hosts.vllm.settings import check_folder, file_policy, reason_against


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.33.0", "0.32.1.dev7+gabc", "0.33"])
def test_known_versions_are_served(version: str) -> None:
    assert reason_against(version) is None


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0.0", "dev", ""])
def test_other_versions_are_not_and_the_reason_names_both(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = reason_against(version)
    assert reason is not None and "known are 0.26 to 0.33" in reason and version in reason
    monkeypatch.setenv("MOEGRAFT_VLLM", "1")
    assert reason_against(version) is None


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_VLLM", "0")
    assert reason_against("0.32.0") == "MOEGRAFT_VLLM=0 switches it off"
    monkeypatch.setenv("MOEGRAFT_VLLM", "yes")
    with pytest.raises(MoegraftError, match="MOEGRAFT_VLLM='yes' is not a switch"):
        reason_against("0.32.0")
    assert vllm_linears()
    monkeypatch.setenv("MOEGRAFT_VLLM_LINEARS", "0")
    assert not vllm_linears()


def test_adapters_come_from_the_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "good", root / "linked", outside):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (root / "linked" / "adapter_model.safetensors").symlink_to(outside / "adapter_config.json")
    (root / "away").symlink_to(outside)
    monkeypatch.delenv("MOEGRAFT_ADAPTER_ROOT", raising=False)
    check_folder(str(outside))
    assert file_policy().root is None
    monkeypatch.setenv("MOEGRAFT_ADAPTER_ROOT", str(root))
    assert file_policy().root == str(root)
    check_folder(str(root / "good"))
    for bad in (outside, root / "linked", root / "away", root / ".." / "outside", "some/name"):
        with pytest.raises(AdapterError, match="outside of the folder that adapters may be read"):
            check_folder(str(bad))
    monkeypatch.setenv("MOEGRAFT_ADAPTER_ROOT", str(root / "nothing"))
    with pytest.raises(AdapterError, match="is no folder on this machine"):
        check_folder(str(root / "good"))


def test_vllm_finds_the_plugin() -> None:
    (found,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "moegraft")
    assert found.value == "moegraft.hosts.vllm.plugin:register"
    assert callable(found.load())


def test_without_vllm_the_plugin_says_why_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from moegraft.hosts.vllm import plugin

    plugin.register()
    assert "its set-up failed" in caplog.text and "No module named 'vllm'" in caplog.text


def test_only_our_words_of_a_workers_error_are_answered() -> None:
    ours = "moegraft refuses the adapter 'x': it's rank 3, not 2"
    error = f"Call failed: Worker failed with error '{ours}', please check the stack trace above"
    assert our_words(error) == our_words(ours) == ours


def test_counters_are_counted_from_0_under_known_names() -> None:
    before = counters.WorkerExtension().moegraft_counters()
    assert before.keys() == counters.MEANINGS.keys()
    counters.count("expert_calls", 2)
    assert counters.counters() == {**before, "expert_calls": before["expert_calls"] + 2}
    with pytest.raises(AssertionError):
        counters.count("other")
