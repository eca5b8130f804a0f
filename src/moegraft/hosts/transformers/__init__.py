"""The embedded host: adapters inside a transformers model. Needs ``moegraft[transformers]``."""

from moegraft.hosts.transformers.attach import Graft, attach
from moegraft.hosts.transformers.quantised import load_quantised
from moegraft.hosts.transformers.spec import model_spec

__all__ = ["Graft", "attach", "load_quantised", "model_spec"]
