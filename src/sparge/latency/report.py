"""Rows as text: one line each while the run goes on, and a Markdown table beside the paper's figures."""

from __future__ import annotations

from pathlib import Path

from sparge.bench.results import MEASURED
from sparge.latency.results import BAR, Results, Row

NONE = "–"
COLUMNS = (
    "model", "attention", "skipped", "formats", "dense s", "sparge s", "**speed-up**", "attention's share",
    "attention alone", "Amdahl allows", "of that", "paper",
)  # fmt: skip


def write_results(results: Results, folder: Path) -> list[Path]:
    """models.json and models.md."""
    paths = [folder / "models.json", folder / "models.md"]
    paths[0].write_text(results.to_json() + "\n")
    paths[1].write_text(table(results))
    return paths


def line(row: Row) -> str:
    """One row for the terminal."""
    times = row.times
    if times is None:
        return f"{row.title}: {row.outcome}, no time: {row.reason}"
    return (
        f"{row.title}: dense {_seconds(times.dense)} s, sparge {_seconds(times.sparse)} s, {times.speedup:.2f}x; "
        f"attention {times.share:.0%} of a dense step, {times.attention_speedup:.2f}x faster with "
        f"{row.skipped or 0:.0%} skipped; {times.achieved:.1%} of the {times.allowed:.2f}x that Amdahl allows "
        f"({_verdict(row)})"
    )


def table(results: Results) -> str:
    """Markdown: the table, and below it what has no time, and why."""
    chip = results.machine.get("gpu") or results.machine.get("cpu")
    known = ", ".join(f"{name} {version}" for name, version in results.versions.items() if version)
    parts = [
        f"`{results.command}` on {chip}, {results.date}; {known}.",
        "Random weights and a forced share of skipped blocks: this is about time and says nothing of quality. One step "
        "is one forward; medians. Attention alone is what sparge computes of it, without waiting for the host. "
        f"Amdahl allows 1 / (1 - a + a / s) with attention's share a and its speed-up s; the bar is {BAR:.0%} of that. "
        "The paper's speed-ups are of other GPUs.",
    ]
    if results.interrupted:
        parts.append("The run was interrupted: these are the models measured until then.")
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in results.rows]
    parts.append("\n".join(lines))
    kernels = [f"- {row.title}: {', '.join(row.dense_kernels)}" for row in results.measured]
    if kernels:
        parts.append("Dense attention by:\n\n" + "\n".join(kernels))
    absent = [f"- {row.title}: {row.reason}" for row in results.rows if row.outcome != MEASURED]
    if absent:
        parts.append("Without a time:\n\n" + "\n".join(absent))
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    times, shape = row.times, row.shape
    if times is None or shape is None:
        return [row.title, row.outcome, *[NONE] * (len(COLUMNS) - 3), _paper(row)]
    heads = str(shape.heads) if shape.heads == shape.kv_heads else f"{shape.heads}/{shape.kv_heads}"
    batch = f"{shape.batch} x " if shape.batch > 1 else ""
    order = ", causal" if shape.causal else ""
    return [
        row.title,
        f"{shape.calls} x {batch}{shape.tokens} tokens, {heads} heads of {shape.head_dim}{order}",
        f"{row.skipped or 0:.1%}",
        f"{row.quantization} ({', '.join(row.backends)})",
        _seconds(times.dense),
        _seconds(times.sparse),
        f"**{times.speedup:.2f}x**",
        f"{times.share:.1%}",
        f"{times.attention_speedup:.2f}x",
        f"{times.allowed:.2f}x",
        f"{times.achieved:.1%} ({_verdict(row)})",
        _paper(row),
    ]


def _verdict(row: Row) -> str:
    return "reached" if row.times is not None and row.times.achieved >= BAR else f"bar {BAR:.0%} missed"


def _paper(row: Row) -> str:
    if row.paper is None:
        return NONE
    skipped = f"{row.paper.sparsity:.1%} skipped"
    return skipped if row.paper.speedup is None else f"{row.paper.speedup:.2f}x on {row.paper.chip}, {skipped}"


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.3g}"
