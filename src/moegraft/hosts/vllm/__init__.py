"""The vLLM host: a plugin that runs the experts and linears of vLLM's LoRA engine.

Installed with ``pip install moegraft[vllm]``, found by vLLM itself through the entry point
``moegraft`` of ``vllm.general_plugins``. Only :mod:`plugin`, :mod:`settings` and :mod:`counters`
can be imported without vLLM.
"""
