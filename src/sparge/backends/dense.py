"""torch's own fused attention, for what sparsity cannot help: nothing to skip, or too little work to look for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.inputs import Inputs
from sparge.redoing import BudgetInTorch
from sparge.stages import Blocks, Output
from sparge.visibility import Visibility

# Operations of dense attention, per multiprocessor, from which a sparse call is tried. Below, launching its kernels
# takes the host about as long as dense attention takes, and only calls that skip much would gain; a graph under
# capture does not pay for launches, but for preparation.
WORTH_PREDICTING = 3e9
WORTH_PROBING = 5e9
WORTH_PREDICTING_CAPTURED = 2e9
# Tokens from which a sparse call is tried on a CPU, the harmonic mean of rows and keys: prediction reads each once,
# dense attention every pair. From here on the CPU engine is about as fast as torch's kernel even if nothing is skipped.
TOKENS_WORTH_PREDICTING = 2048
TOKENS_WORTH_PROBING = 4096
WIDE_AND_CAUSAL = 1.25  # times as many with more than 64 channels in causal order, which halves what can be saved
MOST_MASKED_PAIRS = 1 << 24  # on a CPU torch makes a matrix of causal order between unequal lengths
CUDNN_SINCE = 90  # from Hopper on, cuDNN's kernel is the fastest that torch has


class DenseBackend(BudgetInTorch):
    """Chosen only where the number format is left open: a caller who names one gets it."""

    name = "dense"
    takes_masks = False
    merit = "sparsity cannot help: everything is kept, or the call is too short to gain"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, inputs: Inputs, config: SparseConfig) -> str | None:
        query, sight = inputs.query, inputs.visibility
        if query.device.type not in ("cuda", "cpu"):
            return f"tensors are on {query.device.type}"
        if config.quantization != "auto":
            return f"the call asks for {config.quantization}"
        if inputs.packing is not None or inputs.needs_lse:
            return "packed sequences and LSE need sparge's kernels"
        if sight.key_valid is not None and query.device.type != "cpu":
            return "padding needs sparge's kernels"  # torch may have none but one that keeps every score
        if sight.windowed and sight.q_len > 1:
            return "windows of more than one row need sparge's kernels"
        masks = query.shape[0] if sight.key_valid is not None else int(sight.q_len < sight.k_len)
        if query.device.type == "cpu" and sight.causal and masks * sight.q_len * sight.k_len > MOST_MASKED_PAIRS:
            return "torch would make a mask of every pair"
        if _worth_predicting(inputs, config) and (query.device.type == "cpu" or not config.keeps_everything):
            return "enough work for sparsity to pay"
        return None

    def default_quantization(self, device: torch.device) -> str:
        return "none"

    def summarize(self, inputs: Inputs, config: SparseConfig) -> Blocks:
        nothing = inputs.query.new_empty(0)
        return Blocks(inputs, nothing, nothing, nothing, None, None, None, config.block)

    def select(self, blocks: Blocks, config: SparseConfig) -> BlockMask:
        batch, heads = blocks.inputs.query.shape[:2]
        return BlockMask.all_visible(blocks.inputs.visibility, config.block, batch, heads)

    def attend(self, blocks: Blocks, mask: BlockMask, config: SparseConfig) -> Output:
        inputs = blocks.inputs
        skipped = torch.zeros(inputs.query.shape[:2], dtype=torch.int64, device=inputs.query.device)
        plan, valid = DensePlan.of(inputs), inputs.visibility.key_valid
        if valid is None:
            return Output(plan.attention(inputs.query, inputs.key, inputs.value), None, skipped)
        values = plan.attention_by_mask(inputs.query, inputs.key, inputs.value, inputs.visibility)
        if not values.isfinite().all():  # what is hidden may hold anything, and 0 times NaN is NaN
            key, value = (x.masked_fill(~valid[:, None, :, None], 0) for x in (inputs.key, inputs.value))
            values = plan.attention_by_mask(inputs.query, key, value, inputs.visibility)
        return Output(values, None, skipped)


def _worth_predicting(inputs: Inputs, config: SparseConfig) -> bool:
    device, rows, keys = inputs.query.device, inputs.query.shape[2], inputs.key.shape[2]
    if device.type == "cpu":
        tokens: float = TOKENS_WORTH_PROBING if "probe" in config.rule else TOKENS_WORTH_PREDICTING
        if "probe" in config.rule and inputs.visibility.right == 0 and inputs.query.shape[3] > 64:
            tokens *= WIDE_AND_CAUSAL
        return 2 * rows * keys >= tokens * (rows + keys)
    worth = WORTH_PROBING if "probe" in config.rule else WORTH_PREDICTING
    if torch.cuda.is_current_stream_capturing():
        worth = WORTH_PREDICTING_CAPTURED
    return _operations(inputs) >= worth * _processors(device)


def _operations(inputs: Inputs) -> int:
    batch, heads, q_len, dim = inputs.query.shape
    keys = inputs.key.shape[2] - (q_len // 2 if inputs.visibility.right == 0 else 0)  # of the average row
    return 2 * batch * heads * q_len * keys * (dim + inputs.value.shape[-1])


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class DensePlan:
    """How torch computes a problem without its data."""

    cudnn: bool  # asked for by name, because torch may prefer another
    causal: bool
    lower_right: tuple[int, int] | None  # lengths, where causal order is not between equal ones
    scale: float
    grouped: bool
    keys: slice | None = None  # that a single row's window shows

    @classmethod
    def of(cls, inputs: Inputs) -> DensePlan:
        lengths, sight = (inputs.query.shape[2], inputs.key.shape[2]), inputs.visibility
        causal, square, keys = sight.right == 0, lengths[0] == lengths[1], None
        if sight.windowed and sight.q_len == 1:
            causal, last = False, sight.offset
            keys = slice(max(0, last - sight.left), max(0, min(last + sight.right + 1, sight.k_len)))
        return cls(
            _cudnn_takes(inputs) and (square or not causal),
            causal and square,
            lengths if causal and not square else None,
            inputs.scale,
            inputs.group_size > 1,
            keys,
        )

    def attention_by_mask(self, query: Tensor, key: Tensor, value: Tensor, sight: Visibility) -> Tensor:
        """With padding; rows that see nothing are 0."""
        assert sight.key_valid is not None
        causal = self.causal or self.lower_right is not None
        whole = range(sight.q_len), range(sight.k_len)
        seen = sight.pairs(*whole) if causal or self.keys is not None else sight.key_valid[:, None, None, :]
        values = scaled_dot_product_attention(query, key, value, seen, scale=self.scale, enable_gqa=self.grouped)
        return torch.where(seen.any(-1, keepdim=True), values, 0.0)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.keys is not None:
            key, value = key[:, :, self.keys], value[:, :, self.keys]
        if self.cudnn:
            result = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, False, 0.0, self.causal, False, scale=self.scale
            )
            output: Tensor = result[0]
            return output
        bias = None
        if self.lower_right is not None:
            from torch.nn.attention.bias import causal_lower_right  # which imports torch's compiler, a second

            bias = causal_lower_right(*self.lower_right)
        return scaled_dot_product_attention(
            query, key, value, bias, is_causal=self.causal, scale=self.scale, enable_gqa=self.grouped
        )


def _cudnn_takes(inputs: Inputs) -> bool:
    query, key, value = inputs.query, inputs.key, inputs.value
    dim, value_dim = query.shape[-1], value.shape[-1]
    if query.device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(query.device)
    return (
        10 * major + minor >= CUDNN_SINCE
        and query.dtype != torch.float32
        and inputs.group_size == 1
        and dim == value_dim <= 128
        and dim % 8 == 0
        and min(query.shape[2], key.shape[2]) > 1
        and all(x.stride(-1) == 1 for x in (query, key, value))
    )
