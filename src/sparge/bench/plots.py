"""The pictures: effective speed against sparsity, time against length, what prediction costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparge.bench.machine import peak
from sparge.bench.report import NAMES
from sparge.bench.results import MEASURED, Results, Row

Key = tuple[Any, ...]


def draw_all(results: Results, folder: Path) -> list[Path]:
    """One PNG each; a run without a measured case has none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results.rows if row.outcome == MEASURED]
    pictures: dict[str, Callable[[Any, list[Row], str], None]] = {
        "tflops_by_sparsity.png": _tflops_by_sparsity,
        "time_by_tokens.png": _time_by_tokens,
        "prediction_by_tokens.png": _prediction_by_tokens,
    }
    chip = str(results.machine.get("gpu") or results.machine.get("cpu"))
    paths = []
    for name, draw in pictures.items() if rows else ():
        figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
        draw(axes, rows, chip)
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(_plain)
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=7)
        figure.savefig(folder / name, dpi=130)
        pyplot.close(figure)
        paths.append(folder / name)
    return paths


def _series(rows: list[Row], key: Callable[[Row], Key]) -> list[list[Row]]:
    """Rows that differ only in what the axis shows; where there are such, single rows are left out."""
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    several = [group for group in groups.values() if len(group) > 1]
    return several or list(groups.values())


def _name(row: Row, *fixed: str) -> str:
    case = row.case
    words = {
        "tokens": f"{case.tokens} tokens",
        "sparsity": f"{case.sparsity:.0%} skipped",
        "head_dim": f"D{case.head_dim}",
        "order": "causal" if case.causal else "full",
        "mask": "" if case.mask == "uniform" else case.mask,
        "group": f"group {case.group}" if case.group > 1 else "",
        "quantization": case.quantization,
    }
    return ", ".join(words[name] for name in fixed if words[name])


def _line(axes: Any, points: list[tuple[float, float | None]], label: str, **style: Any) -> None:
    shown = sorted((x, y) for x, y in points if y is not None)
    if shown:
        axes.plot(*zip(*shown, strict=True), label=label, **style)


def _tflops_by_sparsity(axes: Any, rows: list[Row], chip: str) -> None:
    def key(row: Row) -> Key:
        case = row.case
        return case.tokens, case.head_dim, case.causal, case.mask, case.group, case.quantization

    dense: dict[Key, float] = {}
    for group in _series(rows, key):
        label = _name(group[0], "tokens", "head_dim", "order", "mask", "group", "quantization")
        _line(axes, [(_skipped(row), row.tflops("total")) for row in group], label, marker="o", markersize=3)
        flex = [(_skipped(row), row.tflops("flex")) for row in group]
        _line(axes, flex, f"{NAMES['flex']}, {label}", marker="x", markersize=4, linestyle=":")
        for row in group:
            speed = row.tflops(row.base)
            if speed is not None:
                dense[(row.case.head_dim, row.case.causal, row.base)] = speed
    limits = peak(chip)
    shares = [step / 100 for step in range(96)]
    for bits, top in zip((8, 16), limits or (), strict=False):
        roof = [top / (1 - share) for share in shares]
        axes.plot(shares, roof, "k--" if bits == 8 else "k:", linewidth=1, label=f"{bits}-bit peak / (1 - sparsity)")
    for (dim, causal, base), speed in sorted(dense.items()):
        label = f"{NAMES[base]}, D{dim} {'causal' if causal else 'full'}"
        axes.axhline(speed, color="grey", linewidth=0.8, linestyle="-." if causal else "-", label=label)
    axes.set_yscale("log")
    axes.set_xlabel("share of visible blocks skipped")
    axes.set_ylabel("effective TFLOPS (dense operations / time)")
    axes.set_title(f"Whole calls on {chip}", fontsize=10)


def _skipped(row: Row) -> float:
    return row.case.sparsity if row.skipped is None else row.skipped


def _same_but_length(row: Row) -> Key:
    case = row.case
    return case.sparsity, case.head_dim, case.causal, case.mask, case.group, case.quantization


def _time_by_tokens(axes: Any, rows: list[Row], chip: str) -> None:
    drawn: set[Key] = set()  # dense attention takes the same time whatever is skipped
    for group in _series(rows, _same_but_length):
        first = group[0]
        label = _name(first, "head_dim", "order", "mask", "group", "quantization", "sparsity")
        points = [(float(row.case.tokens), row.milliseconds("total")) for row in group]
        _line(axes, points, f"sparge, {label}", marker="o", markersize=3)
        points = [(float(row.case.tokens), row.milliseconds("flex")) for row in group]
        _line(axes, points, f"{NAMES['flex']}, {label}", marker="x", markersize=4, linestyle=":")
        dense = (first.case.head_dim, first.case.causal, first.case.group)
        if dense not in drawn:
            drawn.add(dense)
            points = [(float(row.case.tokens), row.milliseconds(row.base)) for row in group]
            label = f"{NAMES[first.base]}, {_name(first, 'head_dim', 'order', 'group')}"
            _line(axes, points, label, marker="s", markersize=3, linestyle="--")
    _length_axis(axes)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"Time of a whole call on {chip}", fontsize=10)


def _prediction_by_tokens(axes: Any, rows: list[Row], chip: str) -> None:
    for group in _series(rows, _same_but_length):
        label = _name(group[0], "head_dim", "order", "mask", "group", "quantization", "sparsity")
        points = [(float(row.case.tokens), row.prediction_share) for row in group]
        _line(axes, points, label, marker="o", markersize=3)
    _length_axis(axes)
    axes.set_yscale("log")
    axes.set_ylabel(f"preparation + selection, of {NAMES[rows[0].base]}'s time")
    axes.set_title(f"What prediction costs on {chip}", fontsize=10)


def _plain(number: float, _: int | None) -> str:
    return f"{number:g}"


def _length_axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
    axes.set_xlabel("tokens")
