"""Measurements on a GPU: a decode layer beside its limit and its peers, whole models, tile tuning.

Run it as ``moegraft bench ..`` and ``moegraft tune``, or, where the command line's packages are
missing, as ``python -m moegraft.bench ..``. A speed is written only beside a passed check of the
same configuration. The package is no part of serving: nothing else imports it.
"""
