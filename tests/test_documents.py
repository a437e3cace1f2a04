"""Every Python block of the README and the docs runs, in order, in one namespace per document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDED_BY = {
    "transformers": "from transformers import",
    "diffusers": "from diffusers import",
    "skimage": "evaluate.vision import",
    "jinja2": "report.model import",
}
LINK = re.compile(r"(?:\]\(|src=\")([^)#\"]+)")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_blocks_run(document: Path, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    torch.manual_seed(seed)
    namespace: dict[str, object] = {}
    for number, block in enumerate(CODE.findall(document.read_text())):
        for package, needed_by in NEEDED_BY.items():
            if needed_by in block:
                pytest.importorskip(package)
        exec(compile(block, f"{document.name}, block {number}", "exec"), namespace)


def test_readme_shows_code() -> None:
    assert len(CODE.findall(DOCUMENTS[0].read_text())) >= 4


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(document: Path) -> None:
    targets = [link for link in LINK.findall(document.read_text()) if not link.startswith("http")]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing
