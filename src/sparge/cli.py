"""The `sparge` command."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from sparge import __version__
from sparge.backends import BACKENDS
from sparge.bench.cases import GRIDS
from sparge.evaluate.cli import eval_language, eval_vision
from sparge.latency.cli import bench_models
from sparge.report.cli import report

AS_JSON = typer.Option("--json", help="Print JSON and nothing else.")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 an error or a wrong result, 2 an option that does not exist or is out of range, "
    "130 interrupted. Completion of your shell: sparge --install-completion.",
)


def starting_with(names: Iterable[str]) -> Callable[[str], list[str]]:
    """For the shell's completion; typer goes by the parameter's name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sparge {__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Training-free sparse attention: see what this machine can run, try it on a real model, measure it.

    Each command has examples: sparge COMMAND --help
    """
    # --debug is looked for in __main__, where errors arrive; --version has been answered already.


@app.command()
def info(as_json: Annotated[bool, AS_JSON] = False) -> None:
    """What this machine has, which backends can run on it, and why the others cannot.

    Examples:

      sparge info

      sparge info --json
    """
    facts = {"sparge": __version__, **machine()}
    refusals = {backend: backend.unavailable() for backend in BACKENDS}
    if as_json:
        backends = [{"name": backend.name, "reason": refusal} for backend, refusal in refusals.items()]
        print(json.dumps({"machine": facts, "backends": backends}, indent=2))
        return
    console = Console()
    table = Table("", "", title="This machine", show_header=False, title_justify="left")
    for name, value in facts.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        table.add_row(name, "not installed" if shown is None else str(shown))
    console.print(table)
    table = Table("backend", "can run", "what it is, or why not", title="Backends, best first", title_justify="left")
    for backend, refusal in refusals.items():
        summary = (type(backend).__doc__ or "").splitlines()[0]
        table.add_row(backend.name, "no" if refusal else "yes", refusal or summary)
    console.print(table)


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=1024, max=8192, help="Length of the document.")] = 8192,
    runs: Annotated[int, typer.Option(min=1, max=10, help="Timed passes each way; the best counts.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder for the picture of the masks.")] = Path("sparge-demo"),
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Read a real document with SmolLM2-135M, dense and sparse, and compare time and quality.

    Examples:

      sparge demo

      sparge demo --tokens 4096 --runs 3 --output results
    """
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "gguf", "matplotlib")):
        sys.exit("sparge demo needs transformers, gguf and matplotlib: pip install 'sparge[demo]'.")
    from sparge.demo_command import run_demo

    try:
        outcome = run_demo(tokens, runs, output, machine(), as_json)
    except (RuntimeError, OSError) as error:
        sys.exit(f"sparge demo: {error}")
    raise typer.Exit(outcome)


@app.command()
def bench(
    grid: Annotated[
        str | None,
        typer.Option(
            help="quick, bars, full or cpu. Default: bars with a GPU, else cpu.", autocompletion=starting_with(GRIDS)
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads. Default: 32 on a GPU, 4 on a CPU.")] = None,
    block: Annotated[str | None, typer.Option(metavar="ROWS,KEYS", help="Block of the masks. Default: 128,64.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="See sparge info. Default: the best of sparge's kernels.",
            autocompletion=starting_with([backend.name for backend in BACKENDS if backend.takes_masks]),
        ),
    ] = None,
    captured: Annotated[Path | None, typer.Option(metavar="FILE", help="Adds the mask of real Q, K, V.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave a contender out; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for results.json, table.md, plots.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Measure sparge against cuDNN, FlashAttention 2, torch SDPA, FlexAttention and SageAttention in one run.

    Every result is checked against float64 attention before its speed is
    printed; a wrong one of ours makes the exit code 1. Ctrl-C keeps what was
    measured.

    Examples:

      sparge bench --grid quick

      sparge bench --grid bars --out results

      sparge capture real.safetensors

      sparge bench --captured real.safetensors --without flex
    """
    from sparge.bench.command import BadOptionError, make_plan, run_plan

    try:
        plan = make_plan(grid, device, heads, block, backend, captured, tuple(without or ()))
        outcome = run_plan(plan, out, as_json)
    except (BadOptionError, OSError) as error:
        sys.exit(f"sparge bench: {error}")
    raise typer.Exit(outcome)


@app.command()
def capture(
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    tokens: Annotated[int, typer.Option(min=1024, max=8192, help="Length of the document.")] = 8192,
    layer: Annotated[int, typer.Option(min=0, help="Which layer's Q, K and V.")] = 14,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Write Q, K and V of one layer of SmolLM2-135M, reading a real document, for bench, ablate and report.

    Examples:

      sparge capture smollm2.safetensors --layer 20

      sparge report layer20.html --captured smollm2.safetensors
    """
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "gguf")):
        sys.exit("sparge capture needs transformers and gguf: pip install 'sparge[demo]'.")
    from sparge.bench.captured import capture_smollm2

    try:
        file.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after
        made = capture_smollm2(file, tokens, layer)
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"sparge capture: {error}")
    shapes = {"q": list(made.query.shape), "k": list(made.key.shape), "v": list(made.value.shape)}
    if as_json:
        print(json.dumps({"file": str(file), "source": made.source, **shapes}, indent=1))
    else:
        Console().print(f"{file}: {made.source}, q {shapes['q']}, k and v {shapes['k']}")


@app.command()
def ablate(
    file: Annotated[Path, typer.Argument(help="Captured Q, K and V: see sparge capture.")],
    tokens: Annotated[int | None, typer.Option(min=1, help="Use the first so many. Default: 4096 at most.")] = None,
    grid: Annotated[
        str | None, typer.Option(metavar="FRAMES,HEIGHT,WIDTH", help="The tokens' grid: adds token orders.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for JSON, a Markdown table, a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """What each part of the method skips, and what it costs in error: the paper's ablations on real Q, K and V.

    First and second stage, the judge of self-similarity, sub-means, rules,
    block sizes, number formats and token orders. Ctrl-C keeps what was done.

    Examples:

      sparge capture layer14.safetensors

      sparge ablate layer14.safetensors --tokens 4096 --out results

      sparge ablate video.safetensors --grid 16,30,45
    """
    from sparge.ablate import CannotAblateError
    from sparge.ablate import ablate as run_ablation

    try:
        outcome = run_ablation(file, tokens, grid, out, as_json)
    except (CannotAblateError, OSError) as error:
        sys.exit(f"sparge ablate: {error}")
    raise typer.Exit(outcome)


@app.command()
def tune(
    file: Annotated[Path, typer.Argument(help="The profile to write.")],
    l1: Annotated[
        float | None,
        typer.Option(
            "--l1", help="Relative L1: a bound for every head (--spend head), or what sets one budget. Default: 0.02."
        ),
    ] = None,
    l2: Annotated[
        float | None, typer.Option("--l2", help="The same with the second stage, which it switches on.")
    ] = None,
    spend: Annotated[
        str | None,
        typer.Option(
            help="prediction: heads are judged by what the model predicts. model: one error budget for all heads. "
            "head: the bound for every head, as in the paper. Default: prediction; with --l1 or --l2 model."
        ),
    ] = None,
    divergence: Annotated[
        float | None,
        typer.Option(
            help="prediction: nats a token that may be lost. Default: as many as SETTINGS lose by themselves."
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(metavar="SETTINGS", help="What is tuned, as in rule=cdf or probe_rows=8,sinks=2."),
    ] = "default",
    tokens: Annotated[int, typer.Option(min=128, help="Length of each input.")] = 8192,
    inputs: Annotated[int, typer.Option(min=1, max=1000, help="How many inputs.")] = 5,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to cut inputs from; repeatable. Default: Python's documentation."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A folder of transformers, or a Llama's GGUF file. Default: SmolLM2-135M."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: that of the model's file.")
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Search settings per layer and head that skip as many blocks as a bound allows; write them as a profile.

    The inputs should be as long and of the kind that the model will read.
    Ctrl-C keeps what was measured in FILE.journal, and the same command goes
    on from there. In Python: sparge.tune, for any model.

    Examples:

      sparge tune smollm2.safetensors

      sparge tune smollm2.safetensors --l1 0.03 --l2 0.035 --text novel.txt

      sparge tune paper.safetensors --spend head --config rule=cdf --tokens 4096

      sparge tune mine.safetensors --divergence 0.002 --config probe_rows=8

      sparge profile smollm2.safetensors
    """
    needed = ("transformers",) if model is not None and model.suffix != ".gguf" else ("transformers", "gguf")
    if any(importlib.util.find_spec(name) is None for name in needed):
        sys.exit("sparge tune needs transformers, and gguf for GGUF files and SmolLM2: pip install 'sparge[demo]'.")
    from sparge.evaluate.settings import parse_config, parse_device, parse_dtype
    from sparge.tuning.command import Request, run_tune

    try:
        request = Request(
            file, model, tuple(text or ()), tokens, inputs, l1, l2, spend, divergence, parse_config(config),
            parse_device(device), parse_dtype(dtype),
        )  # fmt: skip
        outcome = run_tune(request, as_json)
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"sparge tune: {error}")
    raise typer.Exit(outcome)


@app.command()
def profile(
    file: Annotated[Path, typer.Argument(help="A profile.")],
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Show a profile: model, bounds, and what was found for each layer.

    Examples:

      sparge profile smollm2.safetensors

      sparge profile smollm2.safetensors --json
    """
    from sparge.tuning.command import show

    try:
        show(file, as_json)
    except ValueError as error:
        sys.exit(f"sparge profile: {error}")


app.command("bench-models")(bench_models)
app.command("eval")(eval_language)
app.command("eval-vision")(eval_vision)
app.command("report")(report)


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # some builds are packaged under another name
        return "installed"


def machine() -> dict[str, Any]:
    """Facts about this machine that decide what can run."""
    packages = {}
    for name in ("torch", "triton", "llvmlite", "transformers"):
        packages[name] = _version(name)
    gpus = [
        f"{torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    ]
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        **packages,
    }
