"""The demo's parts: its files, the mixed batch, the comparison with PEFT, losses and speed.

Nothing here prints; ``moegraft demo`` does.
"""
