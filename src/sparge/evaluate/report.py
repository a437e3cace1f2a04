"""Results of a language model as text, for the terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from sparge.evaluate.results import DENSE, CaseResult, LanguageResults, Row
from sparge.evaluate.tasks import PPL

NONE = "–"
COLUMNS = (
    "what", "cases", "dense", "sparse", "change", "95 % interval", "KL", "same token", "skipped", "prefill", "speed-up"
)  # fmt: skip
UNLIMITED = 1000  # columns of a terminal
POSITIONS = 8  # parts of a window in the table by position; the plot has all stretches


def show(results: LanguageResults, console: Console) -> None:
    """A table for each variant; where the terminal is too narrow for it, a few lines for each of its rows."""
    for variant in results.variants:
        rows = [row for row in results.rows() if row.variant == variant]
        table = Table(title=f"{results.model}, {variant}", title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*_cells(row))
        wanted = Measurement.get(console, console.options.update(width=UNLIMITED), table).maximum
        if wanted <= console.width:
            console.print(table)
        else:
            text = "\n".join([f"{results.model}, {variant}", *map(_lines, rows)])
            console.print(text, highlight=False, markup=False)


def _lines(row: Row) -> str:
    what, cases, dense, sparse, change, interval, divergence, same, skipped, prefill, speedup = _cells(row)
    likeness = f"KL {divergence}, same token {same}; " if row.divergence is not None else ""
    judged = f"{sparse} of tokens as dense" if row.dense is None else f"dense {dense}, sparse {sparse}, {change}"
    sure = "" if row.low is None else f"\n    95 % interval {interval}"
    count = f"{cases} case{'s' if row.cases != 1 else ''}"
    return f"  {what} ({count}): {judged}{sure}\n    {likeness}{skipped} skipped, prefill {prefill}, {speedup}"


def to_markdown(results: LanguageResults) -> str:
    """Every table, what was run where, and what the figures mean."""
    parts = [f"# {results.model}"]
    if results.about:
        parts.append("; ".join(f"{name}: {_words(value)}" for name, value in results.about.items()) + ".")
    parts += [*results.notes]
    if results.interrupted:
        parts.append("The run was interrupted: these are the cases done until then.")
    for variant in results.variants:
        rows = [_cells(row) for row in results.rows() if row.variant == variant]
        parts += [f"## {variant}", results.plans[variant].splitlines()[0] + ".", _markdown(COLUMNS, rows)]
    for tokens in dict.fromkeys(case.facts["tokens"] for case in results.cases if case.task == PPL):
        header = ("tokens", *(f"{way}" for way in (DENSE, *results.variants)))
        parts += [f"## Perplexity by position, {tokens} tokens", _markdown(header, _by_position(results, int(tokens)))]
    parts.append(
        "The change of a perplexity is relative, that of a share of answers is a difference. Intervals are paired. "
        "KL is the divergence of the sparse from the dense prediction in nats per token, `same token` the share of "
        "tokens at which both have the same best guess, `skipped` the share of visible blocks, `prefill` the median "
        "seconds of one, dense / sparse, and `speed-up` the median of their ratio."
    )
    return "\n\n".join(parts) + "\n"


def write(results: LanguageResults, folder: Path) -> list[Path]:
    """results.json and results.md."""
    paths = [folder / "results.json", folder / "results.md"]
    paths[0].write_text(results.to_json() + "\n", encoding="utf-8")
    paths[1].write_text(to_markdown(results), encoding="utf-8")
    return paths


def curves(cases: Sequence[CaseResult], ways: Sequence[str]) -> dict[str, list[float]]:
    """Mean loss over the cases by stretch of tokens, for each way."""
    found = {}
    for way in ways:
        losses = [case.readings[way].losses or [] for case in cases]
        found[way] = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    return found


def _by_position(results: LanguageResults, tokens: int) -> list[list[str]]:
    cases = [case for case in results.cases if case.task == PPL and case.facts["tokens"] == tokens]
    ways = (DENSE, *results.variants)
    found = curves(cases, ways)
    stretches = len(found[DENSE])
    parts = min(POSITIONS, stretches)
    rows = []
    for part in range(parts):
        first, last = part * stretches // parts, (part + 1) * stretches // parts
        means = {way: sum(found[way][first:last]) / (last - first) for way in ways}
        cells = [f"{first * tokens // stretches} to {last * tokens // stretches}", f"{math.exp(means[DENSE]):.3f}"]
        cells += [
            f"{math.exp(means[way]):.3f} ({math.expm1(means[way] - means[DENSE]):+.2%})" for way in results.variants
        ]
        rows.append(cells)
    return rows


def _cells(row: Row) -> list[str]:
    digits = 2 if row.task == PPL else 1
    if row.task == PPL:
        dense, sparse = f"{row.dense:.3f}", f"{row.sparse:.3f}"
    else:
        dense, sparse = _percent(row.dense, 1), _percent(row.sparse, 1)
    change = NONE if row.change is None else f"{row.change:+.{digits}%}"
    if row.lost or row.gained:
        change += f" (-{row.lost} +{row.gained})"
    interval = NONE if row.low is None else f"{row.low:+.{digits}%} to {row.high:+.{digits}%}"
    return [
        f"{row.task} {row.tokens}, {row.on}",
        str(row.cases),
        dense,
        sparse,
        change,
        interval,
        NONE if row.divergence is None else f"{row.divergence:.2g}",
        _percent(row.same, 1),
        _percent(row.skipped, 1),
        f"{_short(row.dense_seconds)} / {_short(row.sparse_seconds)} s",
        f"{row.speedup:.2f}x",
    ]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items() if one is not None)
    return str(value)


def _percent(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}%}"


def _short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
