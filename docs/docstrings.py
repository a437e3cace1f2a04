"""An extension of griffe: docstrings, which are written for a terminal, as Markdown.

Lines of "name  what it is" become a list, and examples become code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

ENTRY = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


class TerminalDocstrings(Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines and lines[0].lstrip().startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if not lines or not ENTRY.match(lines[0]):
        return text
    entries: list[str] = []
    for line in lines:
        named = ENTRY.match(line)
        if named:
            entries.append(f"- `{named[1]}`: {named[2]}")
        else:
            entries[-1] += f" {line.strip()}"
    return "\n".join(entries)
