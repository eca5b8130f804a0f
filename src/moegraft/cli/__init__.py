"""The command line ``moegraft``. Needs typer and rich: ``pip install -e '.[cli]'`` in the clone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

#: What the command line needs, and what typer needs itself (pydantic: since 0.29, when it parses).
_NEEDED = ("typer", "rich", "click", "pydantic")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None = those of the process.

    Returns:
        0 for success, 1 when a comparison failed, 2 for an error the user can act on.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from moegraft.cli.app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        message = (
            f"the command line needs {missing}; install it, in the clone of moegraft, with: "
            "pip install -e '.[cli]'"
        )
        if "--json" in arguments:
            print(json.dumps({"error": message}))
        print(f"error: {message}", file=sys.stderr)
        return 2
