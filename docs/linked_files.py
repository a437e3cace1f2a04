"""A hook of mkdocs: files outside docs/ that pages link to, such as results, come along into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
BESIDE = re.compile(r"\]\(([^)#:\s]+)")  # links of a page that came along itself


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = sorted(Path(config.docs_dir).glob("*.md"))
    targets = [target for page in pages for target in OUTSIDE.findall(page.read_text(encoding="utf-8"))]
    for target in targets:  # grows as pages come along
        if not (ROOT / target).is_file() or files.get_file_from_path(target) is not None:
            continue
        files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
        if target.endswith("README.md"):
            folder = Path(target).parent
            links = BESIDE.findall((ROOT / target).read_text(encoding="utf-8"))
            targets += [(folder / link).as_posix() for link in links if not link.startswith("..")]
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"](\1", markdown)
