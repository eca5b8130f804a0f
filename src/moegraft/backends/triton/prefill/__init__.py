"""Layers with many rows per expert, where arithmetic is the limit and not bytes.

    (token_order) -> route -> (block_groups, group_shrink) -> gate_up -> (group_shrink) -> down
    -> finalize

Tiles are large, the weights come by tensor map, and no delta lies in memory: the GEMMs take ``S``
of their rows, ``max_rank`` values each, and add ``S B`` as further steps of their products.
:mod:`.layer` is the whole run, :mod:`.config` says when it is taken. The GEMMs exist twice:
:mod:`.portable` for every GPU with tensor maps, :mod:`.hopper` in CUDA C++ for Hopper
(:mod:`moegraft.backends.cuda`), :mod:`.hopper_fp8` there for FP8 weights and rows.

On Hopper each launch begins while the one before ends (:mod:`moegraft.backends.triton.sync`). All
wait for what is before them; but GEMMs with adapters, which only wait for S of a block, for they
come right behind the shrink, which has waited.
"""
