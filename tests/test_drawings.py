"""The drawings of the documentation can be made anew, and the site has every one of them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
DOCS = Path(__file__).parent.parent / "docs"


def test_every_drawing_is_made_and_shown(tmp_path: Path) -> None:
    made = runpy.run_path(str(DOCS / "drawings.py"))["draw_all"](tmp_path)
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert len(made) == 5
    for path in made:
        assert path.stat().st_size > 5_000
        assert f"images/{path.name}" in pages
        assert (DOCS / "images" / path.name).exists()
