"""What the second stage costs where it skips nothing: attention alone over random masks, with a threshold and without.

    python benchmarks/second_stage.py --json second_stage.json

Each result is checked against float64 attention first.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparge.bench.cases import Case, K
from sparge.bench.check import bound, exact_samples, relative_l1
from sparge.bench.measure import captured_graph
from sparge.bench.problems import Settings, make_problem
from sparge.bench.timing import Timed, medians

CASES = (Case(32 * K, sparsity=0.0), Case(32 * K), Case(32 * K, 64), Case(32 * K, causal=True), Case(8 * K))
SKIPS_NOTHING = -100.0  # natural log


def measured(case: Case, settings: Settings) -> dict[str, Any]:
    """Milliseconds of both, from CUDA graphs: the better of two turns."""
    problem = make_problem(case, settings)
    blocks = problem.backend.summarize(problem.inputs, problem.config)
    blocks.finish()
    samples, replays = exact_samples(problem.inputs, problem.mask), {}
    for name, threshold in (("without", None), ("with", SKIPS_NOTHING)):
        config = replace(problem.config, pv_threshold=threshold)
        attend = partial(problem.backend.attend, blocks, problem.mask, config)
        error = relative_l1(attend().values, samples)
        if not error <= bound(config.quantization, settings.dtype):
            sys.exit(f"{case.label}, {name} the second stage: wrong, relative L1 {error:.3g}.")
        replays[name] = Timed(captured_graph(lambda attend=attend: attend().values)[0])  # type: ignore[misc]
    turns = [medians(replays, settings.device) for _ in range(2)]
    best = {name: min(float(turn[name]) for turn in turns) for name in replays}
    return {"case": case.label, **best, "ratio": best["with"] / best["without"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA GPU.")
    settings, rows = Settings(torch.device("cuda", 0), 32), []
    with torch.no_grad():
        for case in CASES:
            rows.append(measured(case, settings))
            print("{case}: {without:.3f} ms without, {with:.3f} with, {ratio:.3f}".format(**rows[-1]), flush=True)
    if arguments.json is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
