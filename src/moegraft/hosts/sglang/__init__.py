"""The SGLang host: a plugin that runs the experts and linears of SGLang's LoRA engine.

Installed beside SGLang, found by SGLang itself through the entry point ``moegraft`` of
``sglang.srt.plugins``. Only :mod:`plugin`, :mod:`settings` and :mod:`counters` can be imported
without SGLang.
"""
