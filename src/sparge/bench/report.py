"""Rows as text: one line each while the run goes on, and a Markdown table."""

from __future__ import annotations

from pathlib import Path

from sparge.bench.contenders import CONTENDERS
from sparge.bench.results import MEASURED, Results, Row

NAMES = {contender.name: contender.about for contender in CONTENDERS}
NONE = "–"
RIVALS = ("flash", "sdpa", "flex", "sage")
COLUMNS = (
    "tokens", "head_dim", "", "mask", "skipped", "group", "formats", "base ms", "sparge ms", "**speed-up**", "bar",
    "from a CUDA graph", "attention alone", "preparation ms", "selection ms", "prediction, of base",
    *(NAMES[name] for name in RIVALS), "relative L1", "extra memory",
)  # fmt: skip


def write_results(results: Results, folder: Path) -> list[Path]:
    """results.json and table.md."""
    paths = [folder / "results.json", folder / "table.md"]
    paths[0].write_text(results.to_json() + "\n")
    paths[1].write_text(table(results))
    return paths


def line(row: Row) -> str:
    """One row for the terminal."""
    if row.outcome != MEASURED:
        return f"{row.case.label}: {row.outcome}, no speed: {row.reason}"
    others = [name for name in RIVALS if name != row.base and row.ratio(name) is not None]
    rivals = "".join(f"{name} {_times(row.ratio(name))}  " for name in others)
    graph = f"graph {_times(row.ratio('graph_total'))}  " if row.ratio("graph_total") is not None else ""
    return (
        f"{row.case.label}  {row.base} {_ms(row.milliseconds(row.base))} ms  "
        f"sparge {_ms(row.milliseconds('total'))} ms  {_times(row.ratio('total'))}  {graph}"
        f"attention {_times(row.ratio('attend'))}  prediction {_percent(row.prediction_share, 1)}  {rivals}"
        f"relative L1 {_short(row.relative_l1)}"
    )


def table(results: Results) -> str:
    """Markdown: the table, and below it why something has no time."""
    chip = results.machine.get("gpu") or results.machine.get("cpu")
    known = ", ".join(f"{name} {version}" for name, version in results.versions.items() if version)
    base = next((row.base for row in results.rows if row.base), "")
    parts = [
        f"`{results.command}` on {chip}, {results.date}; {known}.",
        f"Ratios are {NAMES.get(base, 'the dense contender')}'s time, the base, over each one's. `sparge` is a whole "
        "call: checking the inputs, preparation, the default predictor and attention over the mask.",
    ]
    parts += [f"{note} ({count}x)." for note, count in sorted(results.notes().items())]
    if results.interrupted:
        parts.append("The run was interrupted: these are the cases measured until then.")
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in results.rows]
    parts.append("\n".join(lines))
    absent = [f"- {reason} ({count}x)" for reason, count in sorted(results.missing().items())]
    if absent:
        parts.append("Without a time:\n\n" + "\n".join(absent))
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    case = row.case
    skipped = case.sparsity if row.skipped is None else row.skipped
    shape = [str(case.tokens), str(case.head_dim), "causal" if case.causal else "full", case.mask, f"{skipped:.0%}"]
    shape += [str(case.group), case.quantization]
    bar = f"{case.bar:g}" if case.bar else ""
    if row.outcome != MEASURED:
        told = [NONE, NONE, f"{row.outcome}: {row.reason}".replace("|", "/"), bar]
        cells = [*shape, *told]
        return cells + [NONE] * (len(COLUMNS) - len(cells))
    return [
        *shape,
        _ms(row.milliseconds(row.base)),
        _ms(row.milliseconds("total")),
        f"**{_times(row.ratio('total'))}**",
        bar,
        _times(row.ratio("graph_total")),
        _times(row.ratio("attend")),
        _ms(row.milliseconds("prepare")),
        _ms(row.milliseconds("select")),
        _percent(row.prediction_share, 1),
        *(_times(row.ratio(name)) for name in RIVALS),
        _short(row.relative_l1),
        _percent(row.extra_memory, 0),
    ]


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}x"


def _percent(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}%}"


def _short(value: float | None) -> str:
    return NONE if value is None else f"{value:.2g}"
