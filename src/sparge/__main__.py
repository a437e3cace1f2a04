"""Entry point of the `sparge` command and of `python -m sparge`: errors are one sentence, with --debug a traceback."""

from __future__ import annotations

import importlib.util
import sys
import traceback


def main() -> None:
    """What a command expects to go wrong it says itself; the rest is said here."""
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        sys.exit("The sparge command needs typer and rich: pip install 'sparge[cli]'.")
    from sparge.cli import app

    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except SystemExit as stopped:
        if debug and stopped.__context__ is not None:
            traceback.print_exception(stopped.__context__)
        raise
    except Exception as error:
        if debug:
            raise
        sys.exit(f"sparge: {_in_one_line(error)} (sparge --debug ... shows how it came to that.)")


def _in_one_line(error: Exception) -> str:
    """Its kind, its message, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__} at {last.filename}, line {last.lineno}: {message}"


if __name__ == "__main__":
    main()
