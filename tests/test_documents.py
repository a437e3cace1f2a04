"""Every Python block of the README and the docs runs, in order, in one namespace per document; every command exists."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
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


def commands(document: Path) -> list[list[str]]:
    """The command lines of blocks without a language, as words."""
    blocks = SHELL.findall(CODE.sub("", document.read_text()))
    lines = [line for block in blocks for line in block.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"(sparge|make|python|torchrun) ", line)]
    return [words[2:] if words[:3] == ["python", "-m", "sparge"] else words for words in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(document):
        if words[0] == "sparge":
            check_options(words[1:])
        elif words[0] == "make":
            assert words[1] in targets, words
        elif words[1] == "-m":
            assert find_spec(words[2]), words
        else:
            script = next(word for word in words if word.endswith(".py"))
            assert (ROOT / script).exists(), words


def test_commands_are_found() -> None:
    assert len(commands(DOCUMENTS[0])) >= 3
    assert sum(words[0] == "sparge" for document in DOCUMENTS for words in commands(document)) > 20


def check_options(words: list[str]) -> None:
    """Raises unless the command and all its options exist."""
    typer = pytest.importorskip("typer")
    from sparge.cli import app

    group = typer.main.get_command(app)
    context = group.make_context("sparge", words, resilient_parsing=True)
    name, *rest = words
    command = group.get_command(context, name)
    assert command is not None, words
    command.make_parser(typer.Context(command, parent=context, info_name=name)).parse_args(rest)
