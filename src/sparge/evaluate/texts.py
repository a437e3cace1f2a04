"""Texts to read: files, and two that come with every Python."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS, CODE = "python-docs", "python-code"
BUILT_IN = (DOCS, CODE)
CODE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Text:
    """A text and the name it goes by in results."""

    name: str
    content: str


def read_texts(names: Sequence[str]) -> list[Text]:
    """Files, or built-in texts by name; none: Python's documentation."""
    texts = [_read(name) for name in names or (DOCS,)]
    taken = [text.name for text in texts]
    double = next((name for name in taken if taken.count(name) > 1), None)
    if double is not None:
        raise ValueError(f"two texts are called {double}; each needs a name of its own.")
    return texts


def _read(name: str) -> Text:
    if name == DOCS:
        from pydoc_data.topics import topics

        return Text(DOCS, "\n\n".join(topics[topic] for topic in sorted(topics)))
    if name == CODE:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return Text(CODE, "\n\n".join(file.read_text(encoding="utf-8") for file in files)[:CODE_CHARACTERS])
    file = Path(name)
    if not file.is_file():
        raise ValueError(f"there is no text {name}; give a file, or one of {', '.join(BUILT_IN)}.")
    try:
        return Text(file.stem, file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a UTF-8 text.") from error


class Encoder:
    """A tokenizer of transformers for texts in pieces: `start` is what it puts before a whole text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        first = getattr(tokenizer, "bos_token_id", None)
        self.start: list[int] = [first] if first is not None and tokenizer("a")["input_ids"][:1] == [first] else []
        self._whole: dict[Text, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def whole(self, text: Text) -> list[int]:
        """A long text, cut into tokens once."""
        if text not in self._whole:
            self._whole[text] = self(text.content)
        return self._whole[text]


def windows(text: str, ids: Sequence[int], tokens: int, count: int) -> list[list[int]]:
    """`count` windows of exactly `tokens` ids that do not overlap, spread evenly over a text called `text`."""
    whole = len(ids) // tokens
    if whole < count:
        raise ValueError(f"{text} holds {whole} windows of {tokens} tokens, and {count} were asked for.")
    places = [index * whole // count * tokens for index in range(count)]
    return [list(ids[place : place + tokens]) for place in places]
