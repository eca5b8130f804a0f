"""GPU kernels for decode-shaped batches, in Triton. Not yet a backend that the plan can choose.

    route -> lora_shrink -> gate_up_activation -> lora_shrink -> down_expand -> finalize

:mod:`moegraft.backends.triton.launch` runs them; each kernel file says which stages it replaces.
"""
