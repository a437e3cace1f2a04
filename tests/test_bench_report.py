"""Results as JSON, table and plots."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparge.bench.cases import Case
from sparge.bench.machine import Peak, hardware, peak, versions
from sparge.bench.report import line, table, write_results
from sparge.bench.results import FAILED, MEASURED, NOT_RUN, WRONG, Results, Row, Timing


def measured(tokens: int, sparsity: float, total: float) -> Row:
    times = {
        "total": total,
        "attend": 0.8 * total,
        "predict": 0.15,
        "prepare": 0.1,
        "select": 0.1,
        "graph_total": total,
        "cudnn": 8.0,
    }
    timings = [Timing(name, taken, 8.0 / taken, 0.001) for name, taken in times.items()]
    timings += [Timing("flash", 10.0, 0.8, 0.002), Timing("sage", None, reason="sageattention is not installed")]
    return Row(
        Case(tokens, sparsity=sparsity, bar=2.0), MEASURED, heads=32, backend="triton", skipped=sparsity, base="cudnn",
        relative_l1=0.039, max_relative_l1=0.06, extra_memory=0.5, timings=tuple(timings),
    )  # fmt: skip


RESULTS = Results(
    date="2026-01-01T00:00:00+00:00",
    command="sparge bench --grid bars",
    machine={"cpu": "a CPU", "gpu": "NVIDIA H200"},
    versions={"torch": "2.11.0", "sageattention": None},
    settings={"heads": 32, "block": [128, 64]},
    rows=(
        measured(32768, 0.0, 7.0),
        measured(32768, 0.6, 4.0),
        measured(8192, 0.6, 2.0),
        Row(Case(4096, mask="real"), NOT_RUN, "needs --captured FILE"),
    ),
)
BAD = Row(Case(4096), WRONG, "wrong result (total): relative L1 0.5, bound 0.06", 32, "triton", 0.6, "cudnn", 0.5, 0.06)


def test_json_round_trip() -> None:
    assert Results.from_json(RESULTS.to_json()) == RESULTS
    assert json.loads(RESULTS.to_json())["rows"][0]["timings"][0]["milliseconds"] == 7.0


def test_derived_numbers() -> None:
    row = RESULTS.rows[1]
    assert row.ratio("total") == 2.0
    assert row.prediction_share == pytest.approx(0.15 / 8)
    older = replace(row, timings=tuple(timing for timing in row.timings if timing.name != "predict"))
    assert older.prediction_share == pytest.approx(0.2 / 8)
    assert row.tflops("total") == pytest.approx(4 * 32 * 32768**2 * 128 / 4e-3 / 1e12)
    assert row.milliseconds("flex") is None
    assert row.tflops("sage") is None


def test_wrong_and_failed_rows_are_wrong_and_refused_ones_are_not() -> None:
    assert not RESULTS.any_wrong
    for outcome in (WRONG, FAILED):
        assert Results("", "", {}, {}, {}, (Row(Case(4096), outcome),)).any_wrong


def test_the_table_has_every_row_and_every_reason() -> None:
    text = table(RESULTS)
    lines = [part for part in text.splitlines() if part.startswith("|")]
    assert len(lines) == 2 + len(RESULTS.rows)
    assert len({part.count("|") for part in lines}) == 1
    for words in ("**2.00x**", "1.9%", "sageattention is not installed (3x)", "needs --captured FILE", "NVIDIA H200"):
        assert words in text
    assert "interrupted" not in text


def test_a_wrong_row_shows_no_speed() -> None:
    told = [line(BAD), table(Results("", "", {}, {}, {}, (BAD,)))]
    for text in told:
        assert "wrong" in text
        assert "x**" not in text
        assert " ms  " not in text


def test_lines_name_base_ours_and_rivals() -> None:
    text = line(RESULTS.rows[1])
    for words in ("cudnn 8.000 ms", "sparge 4.000 ms", "2.00x", "graph 2.00x", "flash 0.80x", "relative L1 0.039"):
        assert words in text


def test_files_are_written(tmp_path: Path) -> None:
    assert [path.name for path in write_results(RESULTS, tmp_path)] == ["results.json", "table.md"]
    assert Results.from_json((tmp_path / "results.json").read_text()) == RESULTS
    assert (tmp_path / "table.md").read_text() == table(RESULTS)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws the plots")
def test_plots_are_drawn_with_the_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import axes

    from sparge.bench.plots import draw_all

    labels: list[str] = []
    plot = axes.Axes.plot
    monkeypatch.setattr(
        axes.Axes,
        "plot",
        lambda self, *args, **options: [labels.append(options["label"]), plot(self, *args, **options)][1],
    )
    paths = draw_all(RESULTS, tmp_path)
    assert [path.name for path in paths] == ["tflops_by_sparsity.png", "time_by_tokens.png", "prediction_by_tokens.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert sum("peak" in label for label in labels) == 2
    assert any(label.startswith("cuDNN") for label in labels)
    assert draw_all(Results("", "", {}, {}, {}, (BAD,)), tmp_path) == []


def test_peaks_of_known_chips_only() -> None:
    assert peak("NVIDIA H200") == peak("NVIDIA H100 80GB HBM3") == Peak(1979, 989)
    assert peak("NVIDIA H100 PCIe") is None
    assert peak("AMD EPYC") is None


def test_machine_and_versions_are_json() -> None:
    import torch

    facts = json.loads(json.dumps({"machine": hardware(torch.device("cpu")), "versions": versions()}))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"]["threads"] == torch.get_num_threads()
