"""What the commands here say when they cannot go on: one sentence, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExampleError(ValueError):
    """The message is one sentence."""


@contextmanager
def said_plainly() -> Iterator[None]:
    try:
        yield
    except ExampleError as error:
        raise SystemExit(str(error)) from None
