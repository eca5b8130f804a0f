"""When the plugin is active, and where adapters may be read from."""

from __future__ import annotations

from pathlib import Path

from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.safe_open import check_inside
from moegraft.env import adapter_root, vllm_setting
from moegraft.hosts import versions

#: The versions of vLLM whose insides this plugin knows: (major, minor), oldest and newest.
OLDEST, NEWEST = (0, 26), (0, 33)


def reason_against(version: str) -> str | None:
    """Return None when the plugin may act in vLLM ``version``, else why it does not.

    ``MOEGRAFT_VLLM=0`` switches it off, ``1`` lets it act in versions outside the known ones.
    """
    return versions.reason_against("vLLM", version, OLDEST, NEWEST, "MOEGRAFT_VLLM", vllm_setting())


def file_policy() -> FilePolicy:
    """Return where adapters may lie: in the folder of ``MOEGRAFT_ADAPTER_ROOT``, else anywhere.

    Raises:
        AdapterError: it is no folder on this machine; so no adapter is read.
    """
    return FilePolicy(root=adapter_root())


def check_folder(folder: str) -> None:
    """Refuse an adapter outside of the root: its folder, and whatever a link in it leads to.

    vLLM opens the config itself, and all of an adapter that moegraft does not read.

    Raises:
        AdapterError: outside, or the root is no folder.
    """
    policy = file_policy()
    if policy.root is None:
        return
    real = check_inside(Path(folder), policy)
    if real.is_dir():
        for path in real.rglob("*"):
            check_inside(path, policy)
