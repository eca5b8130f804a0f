"""Quantised expert weights: formats as data, and their exact meaning in torch.

``formats`` has the descriptors, ``elements`` and ``scales`` the number types, ``matrices`` the way
there and back, ``experts`` the same for a layer's :class:`moegraft.types.ExpertWeights`.
"""

from moegraft.quant.formats import FORMATS, WeightFormat, format_of

__all__ = ["FORMATS", "WeightFormat", "format_of"]
