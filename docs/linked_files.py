"""A hook of mkdocs: files outside docs/ that pages link to, such as results, come along into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page in sorted(Path(config.docs_dir).glob("*.md")):
        for target in OUTSIDE.findall(page.read_text(encoding="utf-8")):
            if (ROOT / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"](\1", markdown)
