"""Base products over every weight format, shared by the GEMM kernels.

:mod:`.product` is what the kernels call, one file per kind of weights has its K loop, :mod:`.load`
how they load a tile, :mod:`.rows` the activations as those loops read them, :mod:`.arguments` what
a launch passes, :mod:`.tiles` the tiles. The delta of adapters is outside of all this: it reads
activations as they are.
"""
