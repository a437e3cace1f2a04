"""The public functions. `_run` is the whole pipeline."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge.backends import Choice, choose, takes_packed
from sparge.block_mask import BlockMask
from sparge.budget import enforce
from sparge.calls import Known, kind_of_call, known_call, remember
from sparge.config import SparseConfig
from sparge.distributed.agreement import refusals_told
from sparge.distributed.context import current_parallel, refuse_in_block
from sparge.distributed.run import Results, attend_packed_shards, attend_shards
from sparge.inputs import Inputs, Window, pack_inputs, prepare_inputs, restore
from sparge.judging import Verdict
from sparge.library import is_traced, traced_attention
from sparge.observe import is_observed, note
from sparge.packing import Packing, sequence_ends
from sparge.replay import recorded
from sparge.stages import Output, Stats

DEFAULT = SparseConfig()
Result = Any  # the output, or a tuple: the output, then the LSE and the Stats if asked for


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: SparseConfig | None = None,
    window: Window | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
) -> Result:
    """Sparse attention with the arguments of torch.nn.functional.scaled_dot_product_attention, and a few more.

    One difference: is_causal with unequal lengths aligns bottom-right (the last query sees every key), as
    FlashAttention does; torch aligns top-left. Rows that see no key give 0 (and an LSE of -inf).

    attn_mask     boolean key padding [B, 1, 1, Nk], True = attend; combines with is_causal and window
    config        SparseConfig(); the default needs no tuning
    window        (left, right) keys each row sees around its own position; None or -1: no limit
    layout        "BHSD" or "BSHD", of the inputs and the output
    return_lse    also return the float32 natural-log LSE [B, Hq, Nq]
    return_stats  also return Stats, its tensors on the device

    >>> q, k, v = torch.randn(3, 1, 8, 1024, 64).unbind(0)
    >>> out, stats = attention(q, k, v, is_causal=True, return_stats=True)
    >>> out.shape, stats.visible.shape
    (torch.Size([1, 8, 1024, 64]), torch.Size([1, 8]))
    """
    if is_traced() and dropout_p == 0.0:
        traced = traced_attention(
            query, key, value, attn_mask, is_causal, scale, enable_gqa, config, window, layout, return_lse
        )
        return _chosen(traced, return_lse, return_stats)
    parallel, kind = current_parallel(), None
    if parallel is None:
        kind = kind_of_call(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, config, window, layout, return_lse
        )
        known = known_call(kind)
        if known is not None:
            again = known.again(query, key, value) if return_stats is False and not is_observed() else None
            if again is not None:
                return _chosen((*again, None), return_lse, return_stats)
            run = _run(known.inputs(query, key, value), known.choice.config, known=known)
            return _result(run, return_lse, return_stats)
    with refusals_told():
        inputs = prepare_inputs(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, layout, needs_lse=return_lse
        )
        config = _config(config)
    if parallel is None:
        run = _run(inputs, config)
        remember(kind, inputs, run.choice)
        return _result(run, return_lse, return_stats)
    alone = functools.partial(_alone, return_stats=return_stats)
    with _exact_arithmetic(inputs):
        values, lse, stats = attend_shards(inputs, config, parallel, return_stats, alone)
    return _chosen((restore(values, layout), lse, stats), return_lse, return_stats)


def attention_and_mask(
    mask: BlockMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    config: SparseConfig,
    layout: str = "BHSD",
    **arguments: Any,
) -> tuple[Tensor, BlockMask | None]:
    """`attention`, with the mask of an earlier call if one is given; and the mask that it had, None if it was dense."""
    inputs = prepare_inputs(query, key, value, attn_mask, layout=layout, **arguments)
    run = _run(inputs, config, mask)
    return restore(run.output.values, layout), None if run.choice.backend.name == "dense" else run.mask


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    quantization: str = "auto",
    pv_threshold: float | tuple[float, ...] | None = None,
    window: Window | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
) -> Result:
    """Attention over the blocks of a mask of one's own, and nothing else: no block is added to it.

    Causal order, window and padding still apply inside the blocks. A row all of whose blocks are left out gives 0.
    """
    refuse_in_block("block_sparse_attention")
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a sparge.BlockMask, not {type(mask).__name__}; see BlockMask.from_dense.")
    inputs = prepare_inputs(
        query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, window, layout, needs_lse=return_lse
    )
    config = SparseConfig(rule="topk", topk=1.0, block=mask.block, quantization=quantization, pv_threshold=pv_threshold)
    return _result(_run(inputs, config, mask), return_lse, return_stats)


def predict_mask(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: SparseConfig | None = None,
    window: Window | None = None,
    layout: str = "BHSD",
) -> BlockMask:
    """The mask that `attention` would use, alone; also for calls so short that `attention` would rather be dense.

    But for blocks kept because their values are not finite, and heads that max_error has computed anew: neither can be
    known from Q and K.

    >>> q, k = torch.randn(2, 1, 4, 512, 64).unbind(0)
    >>> predict_mask(q, k, config=SparseConfig(rule="topk", topk=0.25, subblocks=(1, 1), sinks=0))
    BlockMask(batch=1, heads=4, 4 x 8 blocks of 128 x 64, sparsity 75.0%)
    """
    refuse_in_block("predict_mask")
    inputs = prepare_inputs(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, window, layout)
    with _exact_arithmetic(inputs):
        choice = choose(inputs, replace(_config(config), quantization="none"))  # number formats do not change the mask
        return choice.backend.select(choice.backend.summarize(inputs, choice.config), choice.config)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    config: SparseConfig | None = None,
    window: Window | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
) -> Result:
    """Attention over sequences packed end to end: [tokens, heads, head_dim], as FlashAttention's varlen functions.

    Sequence n holds rows cu_seqlens[n] to cu_seqlens[n + 1]; GQA is taken from the head counts. The LSE is
    [Hq, query tokens]; the stats have one row per sequence. Kernels that take all sequences at once read the ends on
    the device: there, ends that are wrong are cut to the tensors instead of being refused, and max_seqlen_q and
    max_seqlen_k must not be too small.
    """
    longest = (max_seqlen_q, max_seqlen_k)
    with refusals_told():
        config = _config(config)
        packing = _checked_packing(cu_seqlens_q, cu_seqlens_k, longest)
        inputs = pack_inputs(query, key, value, packing, longest, is_causal, scale, window, return_lse)
        config.check_heads(query.shape[1])
    parallel = current_parallel()
    packed_alone = functools.partial(_packed, longest=longest, return_stats=return_stats)
    if parallel is None:
        results = packed_alone(inputs, config)
    else:
        alone = functools.partial(_alone, return_stats=return_stats)
        with _exact_arithmetic(inputs):
            results = attend_packed_shards(inputs, longest, config, parallel, return_stats, alone, packed_alone)
    values, lse, stats = results
    return _chosen((values[0].transpose(0, 1), lse if lse is None else lse[0], stats), return_lse, return_stats)


def _checked_packing(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: tuple[int, int]) -> Packing:
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_ends(name, ends)
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"{name} must be an integer, not {length!r}.")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_q describes {len(cu_seqlens_q) - 1} sequences but cu_seqlens_k {len(cu_seqlens_k) - 1}; "
            "they must agree."
        )
    return Packing(cu_seqlens_q, cu_seqlens_k)


def _alone(inputs: Inputs, config: SparseConfig, return_stats: bool) -> Results:
    """One problem on one device."""
    run = _run(inputs, config)
    return run.output.values, run.output.lse, run.stats() if return_stats else None


def _packed(inputs: Inputs, config: SparseConfig, longest: tuple[int, int], return_stats: bool) -> Results:
    """Packed sequences on one device, all at once where a backend can."""
    if not takes_packed(inputs, config):
        return _one_at_a_time(inputs, longest, config, return_stats)
    assert inputs.packing is not None
    ends = (inputs.packing.q_ends, inputs.packing.k_ends)
    there = Packing(*(x.to(inputs.query.device, non_blocking=True) for x in ends))
    return _alone(replace(inputs, packing=there), config, return_stats)


def _one_at_a_time(packed: Inputs, longest: tuple[int, int], config: SparseConfig, return_stats: bool) -> Results:
    """For backends that do not take packed sequences; the host reads their ends."""
    query, key, value = packed.query, packed.key, packed.value
    packing = packed.packing
    assert packing is not None
    q_ends = sequence_ends("cu_seqlens_q", packing.q_ends, query.shape[2], "max_seqlen_q", longest[0])
    k_ends = sequence_ends("cu_seqlens_k", packing.k_ends, key.shape[2], "max_seqlen_k", longest[1])
    heads = query.shape[1]
    values = packed.empty_output().zero_()
    lse = torch.full((1, heads, query.shape[2]), -torch.inf, dtype=torch.float32, device=query.device)
    per_sequence: list[Stats | None] = []
    for n in range(packing.count):
        rows, keys = slice(q_ends[n], q_ends[n + 1]), slice(k_ends[n], k_ends[n + 1])
        if rows.start == rows.stop or keys.start == keys.stop:
            per_sequence.append(None)
            continue
        sight = replace(packed.visibility, q_len=rows.stop - rows.start, k_len=keys.stop - keys.start)
        one = replace(
            packed,
            query=query[:, :, rows],
            key=key[:, :, keys],
            value=value[:, :, keys],
            visibility=sight,
            packing=None,
        )
        run = _run(one, config)
        values[:, :, rows] = run.output.values
        if run.output.lse is not None:
            lse[:, :, rows] = run.output.lse
        per_sequence.append(run.stats())
    return values, lse, _stack_stats(per_sequence, values) if return_stats else None


@dataclass(frozen=True)
class Run:
    """One trip through the pipeline."""

    inputs: Inputs
    choice: Choice
    mask: BlockMask
    output: Output
    verdict: Verdict | None = None

    def stats(self) -> Stats:
        packing = self.inputs.packing
        if packing is not None:
            executed, visible = packing.blocks_per_sequence(self.mask, self.inputs.visibility)
        else:
            heads = self.inputs.query.shape[:2]
            executed, visible = (x.expand(heads) for x in (self.mask.kept_per_head, self.mask.visible_per_head))
        name, quantization = self.choice.backend.name, self.choice.config.quantization
        skipped = self.output.skipped_pv.clone()  # a backend may hand out a view of shared zeros
        if self.verdict is None:
            return Stats(executed, visible, skipped, name, self.choice.reason, quantization)
        error, redone = self.verdict.error, self.verdict.over
        executed = torch.where(redone, visible, executed)
        return Stats(executed, visible, skipped, name, self.choice.reason, quantization, error, redone)


def _run(inputs: Inputs, config: SparseConfig, mask: BlockMask | None = None, known: Known | None = None) -> Run:
    if is_traced():
        raise RuntimeError("torch's tracers see only sparge.attention: call this function outside the traced code.")
    with _exact_arithmetic(inputs):
        choice = choose(inputs, config, own_mask=mask is not None) if known is None else known.choice
        backend, config = choice.backend, choice.config
        with recorded() if known is not None and known.to_record else nullcontext() as recording:
            blocks = backend.summarize(inputs, config)
            mask = backend.select(blocks, config) if mask is None else _visible_part(mask, inputs)
            output = backend.attend(blocks, mask, config)
        if known is not None and recording is not None:
            known.keep(recording, inputs, output)
        judged = (output,) if config.max_error is None else enforce(output, blocks, backend, config)
        run = Run(inputs, choice, mask, *judged)
    note(run)
    return run


def _exact_arithmetic(inputs: Inputs) -> AbstractContextManager[Any]:
    """Autocast would round the float32 arithmetic inside to 16 bits."""
    kind = inputs.query.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _result(run: Run, return_lse: bool, return_stats: bool) -> Result:
    values = restore(run.output.values, run.inputs.layout)
    return _chosen((values, run.output.lse, run.stats() if return_stats else None), return_lse, return_stats)


def _chosen(results: tuple[Any, Any, Any], return_lse: bool, return_stats: bool) -> Result:
    """(values, lse, stats) cut to what was asked for."""
    for name, asked in (("return_lse", return_lse), ("return_stats", return_stats)):
        if not isinstance(asked, bool):
            raise TypeError(f"{name} must be True or False, not {asked!r}.")
    wanted = [x for x, asked in zip(results, (True, return_lse, return_stats), strict=True) if asked]
    return tuple(wanted) if len(wanted) > 1 else wanted[0]


def _visible_part(mask: BlockMask, inputs: Inputs) -> BlockMask:
    """A caller's mask, checked against the inputs and cut to what can be seen."""
    batch, heads, q_len, _ = inputs.query.shape
    k_len = inputs.key.shape[2]
    shape = mask.bits.shape[:2]
    if (mask.q_len, mask.k_len) != (q_len, k_len) or shape[0] not in (1, batch) or shape[1] not in (1, heads):
        raise ValueError(
            f"mask is for {shape[0]} x {shape[1]} heads of {mask.q_len} x {mask.k_len} tokens, but the inputs have "
            f"{batch} x {heads} heads of {q_len} x {k_len} tokens."
        )
    if mask.bits.device != inputs.query.device:
        raise ValueError(f"mask is on {mask.bits.device} but query is on {inputs.query.device}; move it there.")
    return mask.cut_to(inputs.visibility, batch)


def _config(config: SparseConfig | None) -> SparseConfig:
    if config is None:
        return DEFAULT
    if not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a sparge.SparseConfig, not {type(config).__name__}.")
    return config


def _check_ends(name: str, ends: Tensor) -> None:
    if not isinstance(ends, Tensor) or ends.dim() != 1 or ends.dtype not in (torch.int32, torch.int64) or len(ends) < 2:
        raise TypeError(f"{name} must be a 1-D int32 or int64 tensor of at least two sequence ends, not {ends!r}.")


def _stack_stats(per_sequence: list[Stats | None], query: Tensor) -> Stats:
    """One row per sequence; an empty one has nothing visible."""
    ran = [stats for stats in per_sequence if stats is not None]
    zero = torch.zeros(1, query.shape[1], dtype=torch.int64, device=query.device)

    def rows(name: str, empty: Tensor = zero) -> Tensor:
        return torch.cat([empty if stats is None else getattr(stats, name) for stats in per_sequence])

    last = ran[-1] if ran else Stats(zero, zero, zero, "none", "no sequence has tokens", "none")
    error, redone = (None, None) if last.error is None else (rows("error", zero.float()), rows("redone", zero.bool()))
    return Stats(
        rows("executed"),
        rows("visible"),
        rows("skipped_pv"),
        last.backend,
        last.reason,
        last.quantization,
        error,
        redone,
    )
