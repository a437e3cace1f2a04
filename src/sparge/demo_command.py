"""What `sparge demo` does with its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sparge import demo
from sparge.config import SparseConfig
from sparge.evaluate.models import SMOLLM2_NAME, load_smollm2
from sparge.progress import INTERRUPTED, progress_on


def run_demo(tokens: int, runs: int, output: Path, machine: dict[str, Any], as_json: bool) -> int:
    """Reads both ways, prints, writes; returns the exit code."""
    console = Console(stderr=as_json)
    output.mkdir(parents=True, exist_ok=True)  # before the work, not after
    try:
        with progress_on(console) as progress:
            result, masks = _read_both_ways(tokens, runs, progress)
    except KeyboardInterrupt:
        console.print("Interrupted before the document was read both ways: nothing was written.", highlight=False)
        return INTERRUPTED
    facts = json.dumps({"model": SMOLLM2_NAME, **result, "machine": machine}, indent=1)
    title = f"{SMOLLM2_NAME}, {tokens} tokens: {result['sparsity']:.0%} of visible blocks skipped"
    demo.draw_masks(masks, output / "masks.png", title)
    (output / "result.json").write_text(facts + "\n")
    if as_json:
        print(facts)
    else:
        console.print(_table(result))
    console.print(f"Picture of the masks and these numbers: {output / 'masks.png'}, {output / 'result.json'}")
    return 0


def _read_both_ways(tokens: int, runs: int, progress: Progress) -> tuple[dict[str, Any], Any]:
    """The comparison as plain numbers, and the masks of the pictured layers."""
    task = progress.add_task(f"loading {SMOLLM2_NAME}", total=None)
    model, tokenizer = load_smollm2()
    layers = model.config.num_hidden_layers
    reader = demo.Reader(model, on_layer=lambda: progress.advance(task))
    document = demo.make_document(tokenizer, tokens)
    warm_up = demo.make_document(tokenizer, 512)
    progress.update(task, description="warming up", total=2 * layers * (1 + runs))
    for config in (None, SparseConfig()):
        reader.read(warm_up, config)
    progress.update(task, description=f"reading {tokens} tokens, dense")
    dense = reader.read(document, None, runs)
    progress.update(task, description=f"reading {tokens} tokens, sparse")
    sparse = reader.read(document, SparseConfig(), runs)
    return demo.summary(document, dense, sparse), reader.recorder.masks(SparseConfig())


def _table(result: dict[str, Any]) -> Table:
    table = Table("", "dense (torch SDPA)", "sparge", title=f"Prefill of {result['tokens']} tokens")
    found = ["yes" if result[f"{way}_found_needle"] else "no" for way in ("dense", "sparse")]
    perplexity = f"{result['sparse_perplexity']:.3f} ({result['perplexity_change']:+.2%})"
    rows = [
        ("prefill, whole model", f"{result['dense_seconds']:.2f} s", f"{result['sparse_seconds']:.2f} s"),
        (
            "  of which attention",
            f"{result['dense_attention_seconds']:.2f} s",
            f"{result['sparse_attention_seconds']:.2f} s",
        ),
        ("speed-up, whole model", "", f"{result['speedup']:.2f}x"),
        ("speed-up, attention", "", f"{result['attention_speedup']:.2f}x"),
        ("visible blocks skipped", "", f"{result['sparsity']:.1%}"),
        ("perplexity", f"{result['dense_perplexity']:.3f}", perplexity),
        ("same most likely next token", "", f"{result['same_best_token']:.1%}"),
        (f"needle found ({result['answer']})", *found),
        ("backend", "torch", f"{result['backend']} (quantization: {result['quantization']})"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
