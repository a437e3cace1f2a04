"""Pictures of an evaluation: perplexity by position, and a heat-map of what was found where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparge.evaluate.report import curves
from sparge.evaluate.results import DENSE, CaseResult, LanguageResults
from sparge.evaluate.tasks import NEEDLE, PPL


def draw_all(results: LanguageResults, folder: Path) -> list[Path]:
    """One PNG for each of the tasks that have a picture."""
    import matplotlib

    matplotlib.use("Agg")
    paths = []
    for task, name, draw in ((PPL, "ppl_by_position.png", _perplexities), (NEEDLE, "needles.png", _heat_maps)):
        cases = [case for case in results.cases if case.task == task]
        if cases:
            paths.append(folder / name)
            draw(cases, [DENSE, *results.variants], results.model, paths[-1])
    return paths


def _perplexities(cases: Sequence[CaseResult], ways: Sequence[str], title: str, path: Path) -> None:
    """A column for each length: the curves above, their change against dense below."""
    from matplotlib import pyplot

    lengths = list(dict.fromkeys(int(case.facts["tokens"]) for case in cases))
    figure, axes = pyplot.subplots(
        2, len(lengths), figsize=(max(6.5, 5 * len(lengths)), 6), sharex="col", squeeze=False, layout="constrained"
    )
    for column, tokens in enumerate(lengths):
        upper, lower = axes[0][column], axes[1][column]
        found = curves([case for case in cases if case.facts["tokens"] == tokens], ways)
        for way in ways:
            places = [(stretch + 0.5) * tokens / len(found[way]) for stretch in range(len(found[way]))]
            upper.plot(places, [math.exp(loss) for loss in found[way]], label=way, linewidth=1.2)
            change = [100 * math.expm1(loss - dense) for loss, dense in zip(found[way], found[DENSE], strict=True)]
            lower.plot(places, change, linewidth=1.2)
        upper.set(title=f"{tokens} tokens", ylabel="perplexity")
        upper.legend(fontsize=7)
        lower.set(xlabel="position", ylabel="change against dense, %")
        for panel in (upper, lower):
            panel.grid(True, alpha=0.25)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _heat_maps(cases: Sequence[CaseResult], ways: Sequence[str], title: str, path: Path) -> None:
    """A row for each number of keys, a column for each way: share of needles found by length and depth."""
    from matplotlib import pyplot

    keys = list(dict.fromkeys(int(case.facts["keys"]) for case in cases))
    lengths = sorted({int(case.facts["tokens"]) for case in cases})
    depths = sorted({float(case.facts["depth"]) for case in cases})
    size = (1.6 + len(ways) * max(2.2, 0.7 * len(lengths)), 0.9 + len(keys) * max(2.2, 0.35 * len(depths)))
    figure, axes = pyplot.subplots(len(keys), len(ways), figsize=size, squeeze=False, layout="constrained")
    image: Any = None
    for row, count in enumerate(keys):
        for column, way in enumerate(ways):
            panel = axes[row][column]
            shares = [[_found(cases, way, count, tokens, depth) for tokens in lengths] for depth in depths]
            image = panel.imshow(shares, cmap="RdYlGn", alpha=0.8, vmin=0, vmax=1, aspect="auto")
            for place, share in np.ndenumerate(np.array(shares)):
                if not math.isnan(share):
                    panel.text(place[1], place[0], f"{share:.0%}", ha="center", va="center", fontsize=6)
            panel.set_xticks(range(len(lengths)), [str(tokens) for tokens in lengths], fontsize=7)
            panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
            panel.set_title(f"{way}, {count} key{'s' if count != 1 else ''}", fontsize=8)
            if column == 0:
                panel.set_ylabel("depth", fontsize=8)
            if row == len(keys) - 1:
                panel.set_xlabel("tokens", fontsize=8)
    figure.colorbar(image, ax=axes, label="share of needles found")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _found(cases: Sequence[CaseResult], way: str, keys: int, tokens: int, depth: float) -> float:
    """NaN, which is drawn white, where an interrupted run has no case."""
    wanted = {"keys": keys, "tokens": tokens, "depth": depth}
    scores = [
        float(case.readings[way].score or 0) for case in cases if all(case.facts[k] == v for k, v in wanted.items())
    ]
    return sum(scores) / len(scores) if scores else math.nan
