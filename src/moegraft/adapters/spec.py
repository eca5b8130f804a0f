"""What a model offers to adapters, and how a name in a file finds its place there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moegraft.sites import VECTOR_KINDS, Site, vector_site

#: Path parts that mark other towers of a multimodal model; their keys never bind to text layers.
OTHER_TOWERS = frozenset(
    (
        *("visual", "vision", "vision_tower", "vision_model", "vision_encoder", "image_encoder"),
        *("audio", "audio_tower", "audio_encoder", "multi_modal_projector", "mm_projector"),
    )
)
#: Path parts in front of ``layers.`` that say nothing: wrappers come and go between producers.
#: Any other part (a draft head's ``mtp``, a ``talker``, an unknown tower) must be the model's own.
_WRAPPERS = frozenset(
    (
        *("base_model", "model", "language_model", "text_model", "transformer", "llm"),
        *("module", "_orig_mod", "_fsdp_wrapped_module"),
    )
)
#: Older or foreign names of a path part -> the name in transformers 5.
_SYNONYMS = {"block_sparse_moe": "mlp"}
#: Other programs' names of what no adapter attaches to -> the usual name.
_OUTER_NAMES = {
    **dict.fromkeys(("unembed_tokens", "output_layer", "embed_out", "lm_head"), "lm_head"),
    **dict.fromkeys(("wte", "word_embeddings", "tok_embeddings", "embed_tokens"), "embed_tokens"),
}


@dataclass(frozen=True)
class ModelSpec:
    """The sites of one model.

    Attributes:
        sites: every place an adapter can attach, in model order.
        refused: dotted path -> why an adapter can't attach there (output head, embeddings, ..).
        name: the model, for messages.
        serves_vectors: True where the host serves biases of lora_B and DoRA on linears.
    """

    sites: tuple[Site, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    name: str = "this model"
    serves_vectors: bool = False

    @cached_property
    def table_sites(self) -> tuple[Site, ...]:
        """``sites``, and the vector sites of linears: what a bank needs."""
        linears = [s for s in self.sites if s.kind == "linear" and self.serves_vectors]
        return (*self.sites, *(vector_site(s, kind) for s in linears for kind in VECTOR_KINDS))

    @cached_property
    def _by_path(self) -> dict[str, Site]:
        paths = {site.name: site for site in self.sites}
        return {**{alias: s for s in self.sites for alias in s.aliases}, **paths}

    @cached_property
    def _by_suffix(self) -> dict[str, set[str]]:
        """Path from ``layers.`` on -> full paths; only used where it is unique."""
        found: dict[str, set[str]] = {}
        for path in self._by_path:
            found.setdefault(_layer_suffix(path), set()).add(self._by_path[path].name)
        return found

    @cached_property
    def _last_parts(self) -> frozenset[str]:
        """What a path must end in to be found by its suffix; tells most paths apart at once."""
        return frozenset(s.rpartition(".")[2] for s in self._by_suffix) | {"language_model"}

    @cached_property
    def _known_prefixes(self) -> frozenset[str]:
        own = {part for path in self._by_path for part in _layer_prefix(path)}
        return _WRAPPERS | own

    def _is_elsewhere(self, path: str) -> bool:
        """True for paths of another tower, known as one or by a prefix this model lacks."""
        return is_other_tower(path) or not self._known_prefixes.issuperset(_layer_prefix(path))

    @cached_property
    def _experts_of_layer(self) -> dict[str, list[Site]]:
        found: dict[str, list[Site]] = {}
        for site in self.sites:
            if site.kind == "experts":
                found.setdefault(_layer(site.name), []).append(site)
        return found

    def resolve(self, path: str) -> Site | None:
        """Find the site of a module path: by name, by alias, or by the part after ``layers.``."""
        if path in self._by_path:
            return self._by_path[path]
        last = path.rpartition(".")[2]
        if _SYNONYMS.get(last, last) not in self._last_parts or self._is_elsewhere(path):
            return None
        names = self._by_suffix.get(_layer_suffix(path), set())
        return self._by_path[next(iter(names))] if len(names) == 1 else None

    def resolve_experts(self, path: str) -> Site | None:
        """Find the experts site of a path that ends in ``experts``.

        Falls back on the layer: engines insert or drop path parts, but a layer with exactly one
        experts module leaves no choice.
        """
        site = self.resolve(path)
        if site is not None:
            return site if site.kind == "experts" else None
        layer = _layer(path)
        if self._is_elsewhere(path) or not layer or path.rpartition(".")[2] != "experts":
            return None
        candidates = self._experts_of_layer.get(layer, [])
        return candidates[0] if len(candidates) == 1 else None

    def why_not(self, path: str) -> str:
        """Say why nothing at ``path`` takes an adapter."""
        last = path.rpartition(".")[2]
        for known, reason in self.refused.items():
            if path == known or _layer_suffix(path) == _layer_suffix(known):
                return reason
            if _OUTER_NAMES.get(last) == known.rpartition(".")[2]:
                return f"{reason} (the file calls it {last})"
        if is_other_tower(path):
            return "it belongs to another tower (vision or audio), which is not served"
        return f"{self.name} has no such module"


def is_other_tower(path: str) -> bool:
    """True for paths inside a vision or audio tower."""
    return not OTHER_TOWERS.isdisjoint(path.split("."))


def _layer_prefix(path: str) -> list[str]:
    """Return the parts in front of ``layers``; none when the path has no layers."""
    parts = path.split(".")
    return parts[: parts.index("layers")] if "layers" in parts else []


def _layer_suffix(path: str) -> str:
    parts = [_SYNONYMS.get(part, part) for part in path.split(".")]
    if "layers" in parts:
        parts = parts[parts.index("layers") :]
    return ".".join(part for part in parts if part != "language_model")


def _layer(path: str) -> str:
    """Return ``layers.N`` of a path, or "" when it has none."""
    found = re.search(r"(?:^|\.)(layers\.\d+)\.", path)
    return found.group(1) if found else ""
