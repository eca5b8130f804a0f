"""Hosts: thin layers that map an engine's names and weights to moegraft's. No maths here."""
