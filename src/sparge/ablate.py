"""The paper's ablations on captured Q, K and V: what each part of the method skips, and what it costs in error."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sparge import __version__
from sparge.api import attention
from sparge.bench.captured import Captured, read_captured
from sparge.config import SparseConfig
from sparge.ordering import ORDER_NAMES, token_order
from sparge.progress import INTERRUPTED, progress_on
from sparge.reference import GROUP

DEFAULT = SparseConfig(quantization="none")
PAPER = SparseConfig(rule="cdf", cdf=0.97, subblocks=(1, 1), quantization="none")
SECOND_STAGE = -4.0
TOKENS = 4096  # the oracle, which computes the number formats on a CPU, takes minutes for more

Grid = tuple[int, int, int]


class CannotAblateError(Exception):
    """An option or a file that cannot be followed; the message is one sentence."""


@dataclass(frozen=True)
class Variant:
    """One line of a table: settings, and the order of the tokens."""

    group: str
    name: str
    config: SparseConfig
    order: str | None = None


@dataclass(frozen=True)
class Row:
    """Shares of the visible work, and relative L1 against dense attention over the heads."""

    group: str
    name: str
    scores: float  # Q K products computed
    values: float  # P V products computed
    error: float
    worst_head: float


@dataclass
class Ablation:
    """What was measured, and on what."""

    source: str
    tokens: int
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    def to_json(self) -> str:
        facts = {"sparge": __version__, "torch": torch.__version__, "source": self.source, "tokens": self.tokens}
        return json.dumps({**facts, "rows": [asdict(row) for row in self.rows]}, indent=1)

    def to_markdown(self) -> str:
        lines = [f"{self.source}, {self.tokens} tokens.", ""]
        lines += [
            "| what | variant | Q K computed | P V computed | relative L1 | worst head |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            shares = f"{row.scores:.1%} | {row.values:.1%} | {row.error:.4f} | {row.worst_head:.4f}"
            lines.append(f"| {row.group} | {row.name} | {shares} |")
        return "\n".join(lines) + "\n"


def variants(grid: Grid | None = None) -> list[Variant]:
    """Every ablation; token orders only where the tokens lie on a grid."""
    nothing = SparseConfig(rule="topk", topk=1.0, quantization="none")
    made = [
        Variant("stages", "first", DEFAULT),
        Variant("stages", "second", replace(nothing, pv_threshold=SECOND_STAGE)),
        Variant("stages", "both", replace(DEFAULT, pv_threshold=SECOND_STAGE)),
        Variant("judge of self-similarity", "off", PAPER),
    ]
    made += [Variant("judge of self-similarity", f"{x:g}", replace(PAPER, similarity=x)) for x in (0.3, 0.5, 0.7)]
    made += [Variant("sub-means per block", f"{n} x {n}", replace(DEFAULT, subblocks=(n, n))) for n in (1, 2, 4, 8)]
    made += [Variant("rule", f"cdf {x:g}", replace(PAPER, cdf=x)) for x in (0.9, 0.95, 0.98)]
    made += [Variant("rule", f"top-k {x:g}", replace(nothing, topk=x, subblocks=(1, 1))) for x in (0.5, 0.3, 0.2)]
    made += [Variant("rule", f"gap {x:g}", replace(DEFAULT, rule="gap", gap=x)) for x in (3, 5, 7)]
    made.append(Variant("rule", "threshold .003 or gap 5", replace(DEFAULT, rule=("threshold", "gap"), gap=5.0)))
    made.append(Variant("rule", "the default", DEFAULT))
    blocks = ((64, 32), (64, 64), (128, 64), (128, 128), (192, 64), (256, 128))
    made += [Variant("block", f"{rows} x {keys}", replace(DEFAULT, block=(rows, keys))) for rows, keys in blocks]
    made += [
        Variant("number format", name, replace(DEFAULT, quantization=name)) for name in ("none", "int8", "int8-fp8")
    ]
    if grid is not None:
        made += [Variant("token order", name, DEFAULT, name) for name in ORDER_NAMES]
    return made


def measure(captured: Captured, variant: Variant, exact: Tensor, grid: Grid | None) -> Row:
    """`exact` is dense attention in the order of the file."""
    query, key, value = (x[None].float() for x in (captured.query, captured.key, captured.value))
    order = None if variant.order is None or grid is None else token_order(grid, variant.order)
    if order is not None:
        query, key, value = (order.apply(x) for x in (query, key, value))
    out, stats = attention(
        query, key, value, is_causal=captured.causal, enable_gqa=True, config=variant.config, return_stats=True
    )
    out = out if order is None else order.restore(out)
    off = (out - exact).abs().sum((-1, -2)) / exact.abs().sum((-1, -2))
    executed, visible = int(stats.executed.sum()), int(stats.visible.sum())
    left_out = int(stats.skipped_pv.sum()) * GROUP / variant.config.block[0]
    shares = executed / visible, (executed - left_out) / visible
    return Row(variant.group, variant.name, *shares, float(off.mean()), float(off.max()))


def run(
    captured: Captured,
    chosen: Sequence[Variant],
    grid: Grid | None,
    before: Callable[[Variant], None],
    after: Callable[[Row], None],
) -> Ablation:
    """Ctrl-C keeps the rows that are there."""
    result = Ablation(captured.source, captured.query.shape[1])
    try:
        query, key, value = (x[None].float() for x in (captured.query, captured.key, captured.value))
        exact = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=captured.causal, enable_gqa=True
        )
        for variant in chosen:
            before(variant)
            result.rows.append(measure(captured, variant, exact, grid))
            after(result.rows[-1])
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def ablate(file: Path, tokens: int | None, grid: str | None, out: Path | None, as_json: bool) -> int:
    """What `sparge ablate` does; returns the exit code."""
    captured, cells = _read(file, tokens, grid)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before the work, not after
    chosen, console = variants(cells), Console(stderr=as_json)
    with progress_on(console) as progress:
        task = progress.add_task("dense attention", total=len(chosen))
        result = run(
            captured,
            chosen,
            cells,
            lambda variant: progress.update(task, description=f"{variant.group}: {variant.name}"),
            lambda row: progress.advance(task),
        )
    if as_json:
        print(result.to_json())
    else:
        console.print(_table(result))
    if result.interrupted:
        console.print(f"Interrupted after {len(result.rows)} of {len(chosen)} variants.", highlight=False)
    if out is not None:
        paths = _write(result, out)
        console.print(f"Written: {', '.join(map(str, paths))}", soft_wrap=True, highlight=False, markup=False)
    return INTERRUPTED if result.interrupted else 0


def _read(file: Path, tokens: int | None, grid: str | None) -> tuple[Captured, Grid | None]:
    try:
        captured = read_captured(file)
    except ValueError as error:
        raise CannotAblateError(str(error)) from error
    length = captured.query.shape[1]
    if grid is None:
        tokens = min(length, TOKENS) if tokens is None else tokens
        if tokens > length:
            raise CannotAblateError(f"--tokens must lie from 1 to the file's {length}, not {tokens}.")
        parts = {name: getattr(captured, name)[:, :tokens] for name in ("query", "key", "value")}
        return replace(captured, **parts), None
    if tokens is not None:
        raise CannotAblateError("--grid takes all tokens of the file: leave --tokens out.")
    extents = grid.split(",")
    if len(extents) != 3 or not all(extent.strip().isdigit() for extent in extents):
        raise CannotAblateError(f"--grid must be FRAMES,HEIGHT,WIDTH, not {grid}.")
    frames, height, width = (int(extent) for extent in extents)
    if frames * height * width != length or captured.causal:
        raise CannotAblateError(f"--grid {grid} needs attention that is not causal over as many tokens, not {length}.")
    return captured, (frames, height, width)


def _table(result: Ablation) -> Table:
    table = Table("", "variant", title=f"{result.source}, {result.tokens} tokens", title_justify="left")
    for name in ("Q K computed", "P V computed", "relative L1", "worst head"):
        table.add_column(name, justify="right")
    group = ""
    for row in result.rows:
        if row.group != group and group:
            table.add_section()
        shown, group = ("" if row.group == group else row.group), row.group
        numbers = f"{row.scores:.1%}", f"{row.values:.1%}", f"{row.error:.4f}", f"{row.worst_head:.4f}"
        table.add_row(shown, row.name, *numbers)
    return table


def _write(result: Ablation, folder: Path) -> list[Path]:
    paths = [folder / "ablation.json", folder / "ablation.md"]
    paths[0].write_text(result.to_json() + "\n", encoding="utf-8")
    paths[1].write_text(result.to_markdown(), encoding="utf-8")
    if result.rows and importlib.util.find_spec("matplotlib") is not None:
        paths.append(folder / "ablation.png")
        _draw(result, paths[-1])
    return paths


def _draw(result: Ablation, path: Path) -> None:
    """A panel for each part of the method, the other variants in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys(row.group for row in result.rows))
    figure, grid = pyplot.subplots(
        2, -(-len(groups) // 2), figsize=(12, 6.5), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    panels: list[Any] = list(grid.flat)
    for group, axes in zip(groups, panels, strict=False):
        axes.plot([_work(row) for row in result.rows], [row.error for row in result.rows], ".", color="lightgrey")
        mine = [row for row in result.rows if row.group == group]
        axes.plot([_work(row) for row in mine], [row.error for row in mine], "o", markersize=4)
        for row in mine:
            axes.annotate(row.name, (_work(row), row.error), fontsize=7, xytext=(4, 4), textcoords="offset points")
        axes.set(title=group, yscale="log", ylim=(1e-4, None))
        axes.grid(True, alpha=0.25)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    figure.suptitle(f"{result.source}, {result.tokens} tokens")
    figure.supxlabel("products computed, % of the visible ones")
    figure.supylabel("relative L1")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _work(row: Row) -> float:
    return 50 * (row.scores + row.values)
