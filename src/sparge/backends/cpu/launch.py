"""Runs the compiled CPU kernel: lists the kept blocks, shares them out among threads, puts the LSE together."""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from sparge import reference
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.redoing import BudgetInTorch
from sparge.stages import Blocks, Output
from sparge.words import BITS_AT_ONCE, some_rows, unpack

LOG2_E = math.log2(math.e)


class CpuBackend(BudgetInTorch):
    """Compiled for this CPU at first use; skips blocks in both stages, on every core."""

    name = "cpu"
    takes_masks = True
    merit = "first choice"

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("llvmlite") is None:
            return "needs llvmlite: pip install 'sparge[cpu]'"
        return _broken_llvmlite()

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        if inputs.packing is not None:
            return "takes packed sequences one at a time"
        if inputs.query.device.type != "cpu":
            return f"tensors are on {inputs.query.device.type}"
        if config.quantization not in ("auto", "none"):
            return f"computes in floating point only, not {config.quantization}"
        from sparge.backends.cpu import _attend as kernel

        return kernel.missing_features(_dtype_name(inputs.query))

    def default_quantization(self, device: torch.device) -> str:
        return "none"

    summarize = staticmethod(reference.summarize)
    select = staticmethod(reference.select)

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
        from sparge.backends.cpu import _attend as kernel

        inputs, sight = blocks.inputs, blocks.inputs.visibility
        query, key, value = (_unit_stride(x) for x in (inputs.query, inputs.key, inputs.value))
        batch, heads, q_len, head_dim = query.shape
        output = inputs.empty_output()
        shape = kernel.Shape(
            head_dim=head_dim,
            value_dim=value.shape[-1],
            block_q=mask.block[0],
            block_k=mask.block[1],
            dtype=_dtype_name(query),
            second_stage=config.pv_threshold is not None,
        )
        tensors = {"query": query, "key": key, "value": value, "output": output}
        new = functools.partial(torch.empty, dtype=torch.float32, device="cpu")
        tensors |= {name: new(batch, heads, q_len) for name in ("row_max", "row_sum")}
        tensors |= _work_list(mask, batch, heads)
        tensors["skipped"] = torch.zeros(batch * heads * mask.q_blocks, dtype=torch.int64, device="cpu")
        tensors["v_finite"] = blocks.v_finite.contiguous()
        tensors["counter"] = torch.zeros(1, dtype=torch.int64, device="cpu")
        if sight.key_valid is not None:
            tensors["key_valid"] = sight.key_valid.contiguous()
        if config.pv_threshold is not None:
            tensors["pv_threshold"] = config.per_head("pv_threshold", heads, query.device) * LOG2_E
        integers = {
            "work_items": batch * heads * mask.q_blocks,
            "query_heads": heads,
            "group_size": inputs.group_size,
            "query_blocks": mask.q_blocks,
            "key_blocks": mask.k_blocks,
            "q_len": q_len,
            "k_len": key.shape[2],
            "offset": sight.offset,
            "left": sight.left,
            "right": sight.right,
        }
        for prefix, x in (("q", query), ("k", key), ("v", value), ("o", output)):
            for name, stride in zip(("batch", "head", "row"), x.stride(), strict=False):
                integers[f"{prefix}_{name}"] = stride
        threads = max(1, min(torch.get_num_threads(), integers["work_items"]))
        scratch = new(threads, kernel.scratch_floats(shape))
        calls = [kernel.bind(shape, tensors | {"scratch": own}, integers, inputs.scale * LOG2_E) for own in scratch]
        _run_at_once(calls)
        lse = (tensors["row_max"] + tensors["row_sum"].log2()) / LOG2_E
        return Output(output, lse, tensors["skipped"].view(batch, heads, -1).sum(-1))


@functools.cache
def _broken_llvmlite() -> str | None:
    """An llvmlite that is there but cannot be used is passed over, not an error inside attention."""
    try:
        from sparge.backends.cpu import _attend as kernel

        kernel.compiled(kernel.Shape(16, 16, 64, 32, "float32", False))
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"llvmlite does not work here ({type(error).__name__}: {error})"
    return None


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _work_list(mask: BlockMask, batch: int, heads: int) -> dict[str, Tensor]:
    """Query blocks with the most work first, and each one's kept key blocks in descending order (CSR)."""
    bits = mask.bits.expand(batch, heads, -1, -1).flatten(0, 2)
    counts = mask.kept_per_row.expand(batch, heads, -1).flatten()
    kept = []
    for rows in some_rows(len(bits), mask.k_blocks, BITS_AT_ONCE):
        dense = unpack(bits[rows], mask.k_blocks).flip(-1)
        kept.append((mask.k_blocks - 1 - dense.nonzero()[:, 1]).to(torch.int32))
    return {
        "order": counts.argsort(descending=True, stable=True).to(torch.int32),
        "kept_start": torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        "kept": torch.cat(kept),
    }


def _run_at_once(calls: list[Callable[[], None]]) -> None:
    """One thread per call, the caller's own among them; the kernel releases the interpreter lock.

    Returns, or raises, only when no thread writes any more.
    """
    started: list[threading.Thread] = []
    try:
        for call in calls[1:]:
            helper = threading.Thread(target=call)
            helper.start()
            started.append(helper)
        calls[0]()
    finally:
        for helper in started:
            helper.join()
