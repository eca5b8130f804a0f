"""Layers with many rows per expert, where arithmetic is the limit and not bytes.

    route -> (block_segments, shrink) -> gate_up -> (shrink) -> down -> finalize

Tiles are large, the weights come by tensor map, and no delta lies in memory: the GEMMs take ``S``
of their rows, ``max_rank`` values each, and add ``S B`` as one more step of their products.
:mod:`.layer` is the whole run, :mod:`.config` says when it is taken.
"""
