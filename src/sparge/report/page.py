"""The page: figures and pictures of a report in one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from sparge.integrations.layers import SPARSE
from sparge.report.findings import LayerFindings
from sparge.report.inside import Look

PARTS = ("page.css", "page.js")
METRICS = {
    "sparsity": "Visible blocks skipped",
    "error": "Relative L1 error against exact attention",
    "missed": "True attention in skipped blocks",
}


@dataclass(frozen=True)
class Whole:
    """Seconds of all that a model does while its layers are looked at, both ways."""

    dense: float
    sparse: float
    measured: str  # how, as a half-sentence


@dataclass(frozen=True)
class Report:
    """All that a page shows."""

    title: str
    settings: str
    about: dict[str, Any]
    look: Look
    results: dict[str, Any] = field(default_factory=lambda: {"rows": [], "cases": []})
    whole: Whole | None = None
    vision: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[LayerFindings]:
        return self.look.layers

    @property
    def interrupted(self) -> bool:
        return self.look.interrupted

    def summary(self) -> dict[str, float | None]:
        """Over all heads that were looked at; None where nothing was."""
        errors = [error for layer in self.layers for error in layer.error]
        visible = sum(sum(layer.visible) for layer in self.layers)
        executed = sum(sum(layer.executed) for layer in self.layers)
        dense = sum(layer.seconds.dense for layer in self.layers)
        sparse = sum(_own_seconds(layer) for layer in self.layers)
        return {
            "skipped": (visible - executed) / visible if visible else None,
            "mean_error": sum(errors) / len(errors) if errors else None,
            "worst_error": max(errors, default=None),
            "attention_speedup": dense / sparse if sparse else None,
        }

    def time_split(self) -> list[dict[str, Any]]:
        """Seconds both ways by part; `rest` is known where a whole model was timed and looked at."""
        known = None if self.interrupted else self.whole
        if not self.layers:
            return []
        dense = {"attention": sum(layer.seconds.dense for layer in self.layers)}
        sparse = {
            part: sum(getattr(layer.seconds, part) for layer in self.layers)
            for part in ("prediction", "quantization", "attention")
        }
        split = []
        for way, parts in (("dense", dense), ("sparse", sparse)):
            whole: float = sum(parts.values()) if known is None else getattr(known, way)
            rest = {} if known is None else {"rest": max(0.0, whole - sum(parts.values()))}
            split.append({"way": way, "whole": whole, "parts": {**parts, **rest}})
        return split

    def dense_layers(self) -> list[dict[str, str]]:
        """What was not computed sparse, and why; layers with the same reason together."""
        seen = {layer.name: layer for layer in self.layers}
        reasons: dict[tuple[str, str], list[str]] = {}
        for layer in self.layers:
            if layer.backend == "dense":
                reasons.setdefault(("dense", layer.reason), []).append(layer.name)
        refused, names = self.look.refused, {planned.name for planned in self.look.planned}
        for name in refused:
            if name not in names | seen.keys():
                reasons.setdefault(("dense", refused[name]), []).append(name)
        for planned in self.look.planned:
            if planned.name in seen or (self.interrupted and planned.action == SPARSE):
                continue
            silent = "its calls did not reach sparge; see the notes"
            why = refused.get(planned.name, silent) if planned.action == SPARSE else planned.why
            action = "dense" if planned.action == SPARSE else planned.action
            reasons.setdefault((action, why), []).append(planned.name)
        return [
            {"layers": _range(names), "count": str(len(names)), "action": action, "why": why}
            for (action, why), names in reasons.items()
        ]

    def backends(self) -> list[dict[str, str]]:
        """Which backends ran, in which number format, and why those."""
        chosen: dict[tuple[str, str, str], int] = {}
        for layer in self.layers:
            key = (layer.backend, layer.quantization, layer.reason)
            chosen[key] = chosen.get(key, 0) + 1
        return [
            {"backend": name, "formats": formats, "why": why, "layers": str(count)}
            for (name, formats, why), count in chosen.items()
        ]

    def needles(self) -> dict[str, Any] | None:
        """Shares of needles found, by way and depth."""
        cases = [case for case in self.results["cases"] if case["task"] == "needle"]
        if not cases:
            return None
        depths = sorted({case["depth"] for case in cases})
        ways = list(cases[0]["scores"])
        found = {
            way: [_mean([case["scores"][way] for case in cases if case["depth"] == depth]) for depth in depths]
            for way in ways
        }
        return {"tokens": cases[0]["tokens"], "depths": depths, "found": found}

    def plain(self, pictures: bool = True) -> dict[str, Any]:
        """As JSON has it."""
        layers, order = [layer.plain() for layer in self.layers], self.look.order
        if not pictures:
            for layer in layers:
                del layer["pictures"]
        return {
            "title": self.title, "settings": self.settings, "about": self.about, "summary": self.summary(),
            "interrupted": self.interrupted, "notes": self.notes, "time": self.time_split(),
            "rows": self.results["rows"], "needles": self.needles(), "vision": self.vision, "backends": self.backends(),
            "dense_layers": self.dense_layers(), "layers": layers, "samples": self.samples if pictures else [],
            "measured": None if self.whole is None else self.whole.measured,
            "order": order if pictures or order is None else {**order, "path": None},
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The page in a few words, for a terminal."""
        found = self.summary()
        shown = [f"{self.title}, {self.settings}: {len(self.layers)} layers looked at"]
        if found["skipped"] is not None:
            shown.append(
                f"  {found['skipped']:.1%} of visible blocks skipped; relative L1 {found['mean_error']:.4f} on "
                f"average, {found['worst_error']:.4f} in the worst head; attention {found['attention_speedup']:.2f}x"
            )
        for row in self.results["rows"]:
            if row["task"] == "ppl":
                shown.append(f"  perplexity {row['dense']:.3f} -> {row['sparse']:.3f} ({row['change']:+.2%})")
        for row in self.vision:
            decibels = "equal" if row["psnr"] is None else f"PSNR {row['psnr']:.2f} dB"
            shown.append(f"  {row['settings']}: samples of {row['seeds']} seeds, {decibels}, SSIM {row['ssim']:.4f}")
        return shown + [f"  {one['layers']}: {one['action']}, {one['why']}" for one in self.dense_layers()] + self.notes


def check_writable(page: Path) -> None:
    """Raise unless the page can be written; makes its folder."""
    if page.is_dir():
        raise ValueError(f"{page} is a folder; name the page to write, as in {page / 'report.html'}.")
    page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=page.parent):
        pass


def write_page(report: Report, path: Path) -> None:
    """Written beside its name and then renamed: nobody sees half a page."""
    text = render(report)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)


def render(report: Report) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup  # a dependency of jinja2

    here = resources.files("sparge.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(percent=_percent, words=_words)
    css, javascript = (Markup(here.joinpath(name).read_text(encoding="utf-8")) for name in PARTS)
    facts = report.plain()
    # "</script>" in a name would end the script that holds the data.
    data = Markup(json.dumps(facts, allow_nan=False).replace("<", "\\u003c"))
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(**facts, metrics=METRICS, css=css, javascript=javascript, data=data)


def _own_seconds(layer: LayerFindings) -> float:
    parts = asdict(layer.seconds)
    return float(parts["prediction"] + parts["quantization"] + parts["attention"])


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None, digits: int = 1, signed: bool = False) -> str:
    return "–" if value is None else f"{value:{'+' if signed else ''}.{digits}%}"


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items() if one is not None)
    return str(value)
