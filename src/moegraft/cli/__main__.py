"""``python -m moegraft.cli``."""

import sys

from moegraft.cli import main

sys.exit(main())
