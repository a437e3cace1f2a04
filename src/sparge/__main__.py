"""Entry point of the `sparge` command and of `python -m sparge`."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """A missing extra is one sentence, not a traceback."""
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        sys.exit("The sparge command needs typer and rich: pip install 'sparge[cli]'.")
    from sparge.cli import app

    app()


if __name__ == "__main__":
    main()
