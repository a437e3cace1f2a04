"""How an error in a head's output moves the model's: gradients of outcomes that are drawn from what it predicts.

Small errors e move a prediction by a divergence of half the mean of (g . e)^2 over such gradients g (Fisher's
information), and what single heads do nearly adds up. Where what should be predicted is known, the gradient of the loss
says more: which errors help, and which harm.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparge.config import SparseConfig
from sparge.tuning.measure import Gradient, measured_rows
from sparge.tuning.subjects import Attend, Loss, Subject, differentiable_attention

DRAWS = {"cpu": 1, "cuda": 8}  # of each input; every one is a backward pass
Gradients = dict[tuple[str, int], Gradient]  # by layer and number of its call


def draws_on(device: torch.device, knows_loss: bool) -> int:
    """On a CPU the gradient of a loss alone must do."""
    if knows_loss and device.type == "cpu":
        return 0
    return DRAWS.get(device.type, DRAWS["cpu"])


def drawn_gradients(
    subject: Subject, item: Any, config: SparseConfig, share: float, seed: int
) -> tuple[Tensor, Gradients]:
    """What a model makes of an input, and gradients by every head's output, at the rows that errors are measured on."""
    probes: dict[tuple[str, int], Tensor] = {}
    with torch.enable_grad():
        output = subject.predict(item, probing(probes))
    if not probes:
        raise ValueError("the model computed no attention by `attend`: there is nothing to tune.")
    if not output.requires_grad:
        raise ValueError(
            "the model's output does not follow from what `attend` returns, differentiably: take spend='model'."
        )
    rows = {call: measured_rows(probe.shape[2], config.block[0], share, seed) for call, probe in probes.items()}
    found: dict[tuple[str, int], list[Tensor]] = {call: [] for call in probes}
    generator, there = torch.Generator().manual_seed(seed), output.detach()
    draws = draws_on(there.device, subject.knows_loss)
    pulls = itertools.chain(subject.outcomes(there, draws, generator), subject.losses(item, there))
    for pull in pulls:
        size = pull.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)  # float16 loses small ones
        pulled = torch.autograd.grad(
            output, list(probes.values()), (pull / size).to(pull.dtype), retain_graph=True, allow_unused=True,
            materialize_grads=True,
        )  # fmt: skip
        for call, gradient in zip(probes, pulled, strict=True):
            kept = torch.bfloat16 if gradient.dtype == torch.float16 else gradient.dtype
            some = gradient.index_select(2, rows[call].to(gradient.device))
            found[call].append((some.float() * size).to(kept))
    return there, {call: _sorted_out(parts, draws, len(there)) for call, parts in found.items()}


def _sorted_out(parts: list[Tensor], draws: int, predictions: int) -> Gradient:
    """Gradients of the outcomes, and after them that of the loss if there is one."""
    drawn = torch.stack(parts[:draws]) if draws else parts[0].new_empty(0, *parts[0].shape)
    return Gradient(drawn, parts[draws] if len(parts) > draws else None, predictions)


def sensitivity(loss: Loss, inputs: list[Any], on_input: Callable[[], None]) -> dict[str, Tensor]:
    """Mean squared gradient of the loss by each head's output, per layer, float64 [heads].

    An error in a head's output moves the loss by gradient times error. Errors have no favoured direction, so the
    expected squared change is their mean square times this.
    """
    total: dict[str, Tensor] = {}
    for item in inputs:
        probes: dict[tuple[str, int], Tensor] = {}
        with torch.enable_grad():
            value = loss(item, probing(probes))
            gradients = torch.autograd.grad(value, list(probes.values()))
        for (layer, _), gradient in zip(probes, gradients, strict=True):
            energy = gradient.double().square().mean((0, 2, 3)).cpu()
            total[layer] = total.get(layer, torch.zeros_like(energy)) + energy
        on_input()
    return total


def probing(probes: dict[tuple[str, int], Tensor]) -> Attend:
    """An `attend` that adds a tensor of zeros, heads first, to every output: a gradient by it is one by the output."""
    counted: Counter[str] = Counter()

    def attend(layer: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        output = differentiable_attention(query, key, value, **arguments)
        swapped = arguments.get("layout") == "BSHD"
        probe = torch.zeros_like(output.transpose(1, 2) if swapped else output, requires_grad=True)
        probes[layer, counted[layer]] = probe
        counted[layer] += 1
        return output + (probe.transpose(1, 2) if swapped else probe)

    return attend
