"""When the SGLang plugin acts: the part without SGLang. The rest is in tests/sglang_plugin."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from moegraft.errors import MoegraftError
from moegraft.hosts.sglang import counters
from moegraft.hosts.sglang.settings import reason_against


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23.dev9+gabc"])
def test_known_versions_are_served(version: str) -> None:
    assert reason_against(version) is None


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "0.5", "dev", ""])
def test_other_versions_are_not_and_the_reason_names_both(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = reason_against(version)
    assert reason is not None and "known are 0.5.23" in reason and version in reason
    monkeypatch.setenv("MOEGRAFT_SGLANG", "1")
    assert reason_against(version) is None


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_SGLANG", "0")
    assert reason_against("0.5.23") == "MOEGRAFT_SGLANG=0 switches it off"
    monkeypatch.setenv("MOEGRAFT_SGLANG", "yes")
    with pytest.raises(MoegraftError, match="MOEGRAFT_SGLANG='yes' is not a switch"):
        reason_against("0.5.23")


def test_sglang_finds_the_plugin() -> None:
    (found,) = (e for e in entry_points(group="sglang.srt.plugins") if e.name == "moegraft")
    assert found.value == "moegraft.hosts.sglang.plugin:register"
    assert callable(found.load())


def test_without_sglang_the_plugin_says_why_it_does_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from moegraft.hosts.sglang import plugin

    plugin.register()
    assert "its set-up failed" in caplog.text and "No module named 'sglang'" in caplog.text


def test_counters_are_counted_from_0_under_known_names() -> None:
    before = counters.counters()
    assert before.keys() == counters.MEANINGS.keys()
    counters.count("expert_calls", 2)
    assert counters.counters() == {**before, "expert_calls": before["expert_calls"] + 2}
    with pytest.raises(AssertionError):
        counters.count("other")
