"""What can be tuned: a function that runs a model, a causal language model of transformers, a model of diffusers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from sparge.inputs import prepare_inputs
from sparge.integrations.diffusers.families import family_of
from sparge.integrations.diffusers.hooks import install
from sparge.integrations.diffusers.layers import attention_layers
from sparge.integrations.diffusers.steps import Steps
from sparge.integrations.layers import SPARSE
from sparge.integrations.transformers.interface import ImplementationSwitch, register_attention
from sparge.integrations.transformers.predictions import divergence, logits_of, stretches
from sparge.visibility import Visibility

Attend = Callable[..., Tensor]  # attend(layer name, query, key, value, **arguments of sparge.attention) -> output
Loss = Callable[[Any, Attend], Tensor]
NOTHING_FOLLOWS = -1  # a text's last token
LOSS_TOKENS = 2048  # a gradient needs every layer's activations: this much of each input is enough to weigh heads


class Subject(Protocol):
    """Something that runs attention layers by name."""

    name: str
    loss: Loss | None  # a scalar that depends on every layer's output, differentiably; None: not known
    knows_loss: bool  # whether inputs themselves say what is to be predicted

    def run(self, item: Any, attend: Attend) -> None:
        """One input through the model, every attention layer computed by `attend`."""

    def predict(self, item: Any, attend: Attend) -> Tensor:
        """The same, and what the model makes of the input."""

    def divergence(self, dense: Tensor, other: Tensor) -> float:
        """How far some rows of a prediction lie from the dense model's, both [rows, last extent]."""

    def outcomes(self, output: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Gradients by the output of `draws` outcomes: a small change of the output diverges by half the mean of
        (gradient . change)^2, over all outcomes that could be drawn."""

    def losses(self, item: Any, output: Tensor) -> Iterator[Tensor]:
        """The gradient by the output of the mean loss; nothing if there is none."""

    def close(self) -> None:
        """Leave the model as it was."""


def subject_of(model: Any, name: str | None, loss: Loss | None) -> Subject:
    if hasattr(model, "set_attn_implementation") and hasattr(model, "config"):
        return TransformersSubject(model, name, loss)
    if isinstance(model, torch.nn.Module) and family_of(model) is not None:
        if loss is not None:
            raise ValueError(
                "loss is for functions and language models: a model of diffusers is weighed by its outputs."
            )
        return DiffusersSubject(model, name)
    if isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{type(model).__name__} is no model of transformers or diffusers that sparge knows: pass a function "
            "run(item, attend) that runs it and computes each attention layer as "
            "attend(layer_name, query, key, value, ...)."
        )
    if not callable(model):
        raise TypeError(f"tune takes a model or a function run(item, attend), not {model!r}.")
    return FunctionSubject(model, name, loss)


class FunctionSubject:
    """The caller's own function run(item, attend)."""

    knows_loss = False

    def __init__(self, function: Callable[[Any, Attend], Any], name: str | None, loss: Loss | None) -> None:
        self.function, self.loss = function, loss
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))

    def run(self, item: Any, attend: Attend) -> None:
        self.function(item, attend)

    def predict(self, item: Any, attend: Attend) -> Tensor:
        output = self.function(item, attend)
        if not isinstance(output, Tensor):
            raise TypeError(
                "spend='prediction' compares what the model makes of an input: run(item, attend) must return it as a "
                f"tensor, not {type(output).__name__}."
            )
        return output

    def divergence(self, dense: Tensor, other: Tensor) -> float:
        return relative_square(dense, other)

    def outcomes(self, output: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
        return directions(output, draws, generator)

    def losses(self, item: Any, output: Tensor) -> Iterator[Tensor]:
        return iter(())

    def close(self) -> None:
        pass


class TransformersSubject:
    """A causal language model; inputs are token ids [batch, tokens] without padding, layers go by module name."""

    knows_loss = True

    def __init__(self, model: Any, name: str | None, loss: Loss | None) -> None:
        self.model = model
        self.name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
        self.loss: Loss | None = loss or self._next_token_loss
        self.layers = {id(module): layer for layer, module in model.named_modules()}
        self.attend: Attend | None = None
        register_attention("sparge_tune", self._attention)
        self.switch: ImplementationSwitch | None = ImplementationSwitch(model, "sparge_tune")

    def run(self, item: Any, attend: Attend) -> None:
        self.predict(item, attend)

    def predict(self, item: Any, attend: Attend) -> Tensor:
        """The last hidden states, [batch * tokens, width]."""
        _check_ids(item)
        with self._using(attend), frozen(self.model):
            hidden: Tensor = self.model.base_model(item, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1)

    def divergence(self, dense: Tensor, other: Tensor) -> float:
        """Mean Kullback-Leibler divergence of the next token's distribution, in nats."""
        total = 0.0
        with self._using(exact_attention):  # of the one token that is exchanged
            for some in stretches(len(dense), dense.device):
                both = (logits_of(self.model, hidden[some]).log_softmax(-1) for hidden in (dense, other))
                total += float(divergence(*both).double().sum())
        return max(0.0, total / len(dense))

    def outcomes(self, output: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Of next tokens, drawn from what the model predicts: the gradient of their log probability."""

        def drawn(logged: Tensor, _: slice) -> Tensor:
            chance = torch.rand(len(logged), draws, generator=generator).to(logged.device)
            summed = logged.exp().cumsum(-1)
            return torch.searchsorted(summed, chance * summed[:, -1:]).clamp(max=logged.shape[-1] - 1)

        return (pull / math.sqrt(len(output)) for pull in self._pulls(output, draws, drawn))

    def losses(self, item: Any, output: Tensor) -> Iterator[Tensor]:
        """Of the text's own next tokens: the mean of minus their log probability."""
        following = torch.nn.functional.pad(item[:, 1:], (0, 1), value=NOTHING_FOLLOWS).flatten()

        def own(_: Tensor, some: slice) -> Tensor:
            return following[some, None]

        return (-pull / max(1, len(output) - len(item)) for pull in self._pulls(output, 1, own))

    def _pulls(self, output: Tensor, count: int, tokens: Callable[[Tensor, slice], Tensor]) -> Iterator[Tensor]:
        """Gradients by the output of the log probabilities of tokens(log probabilities, rows) [rows, count], summed."""
        if count == 0:
            return iter(())
        pulls = torch.empty(count, *output.shape, dtype=output.dtype)
        with self._using(exact_attention), torch.enable_grad():
            for some in stretches(len(output), output.device):
                hidden = output[some].requires_grad_()
                logged = logits_of(self.model, hidden).log_softmax(-1)
                chosen = tokens(logged.detach(), some)
                there = (chosen != NOTHING_FOLLOWS).to(logged.dtype)
                for n in range(count):
                    outcome = (logged.gather(1, chosen[:, n : n + 1].clamp(min=0)) * there[:, n : n + 1]).sum()
                    pulls[n, some] = torch.autograd.grad(outcome, hidden, retain_graph=n < count - 1)[0].cpu()
        return (pull.to(output.device) for pull in pulls)

    def close(self) -> None:
        assert self.switch is not None
        self.switch.restore()
        self.model = self.switch = None  # transformers remembers the function, and with it this object, for ever

    def _next_token_loss(self, item: Any, attend: Attend) -> Tensor:
        _check_ids(item)
        few = item[:, :LOSS_TOKENS]
        with self._using(attend):
            logits = self.model(few, use_cache=False).logits
        loss: Tensor = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), few[:, 1:].flatten())
        return loss

    @contextmanager
    def _using(self, attend: Attend) -> Iterator[None]:
        self.attend = attend
        try:
            yield
        finally:
            self.attend = None

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        assert mask is None, "a whole prefill without padding has no mask but the causal one"
        assert self.attend is not None
        if more.get("softcap") is not None:
            raise ValueError(f"{type(module).__name__} caps its scores, which sparge does not do: it cannot be tuned.")
        width = more.get("sliding_window")
        window = None if width is None else (width - 1, 0)
        output = self.attend(
            self.layers[id(module)], query, key, value, is_causal=True, scale=scaling, enable_gqa=True, window=window
        )
        return output.transpose(1, 2).contiguous(), None


class DiffusersSubject:
    """A transformer of diffusers; inputs are the arguments of its forward, layers go by module name.

    Its layers are measured with the visual tokens in order. That text is protected later on top makes errors smaller.
    """

    loss: Loss | None = None
    knows_loss = False

    def __init__(self, model: Any, name: str | None) -> None:
        self.model = model
        self.name: str = name or model.config.get("_name_or_path") or type(model).__name__
        self.attend: Attend | None = None
        layers = {one.name: one.settings for one in attention_layers(model, None, None) if one.action == SPARSE}
        taken = {key: settings for key, settings in layers.items() if settings is not None}
        self.hooks = install(model, taken, Steps(0), self._attend)

    def run(self, item: Any, attend: Attend) -> None:
        self.predict(item, attend)

    def predict(self, item: Any, attend: Attend) -> Tensor:
        if not isinstance(item, Mapping):
            raise TypeError("an input of a model of diffusers must be a dict: the arguments of its forward by name.")
        self.attend = attend
        try:
            with frozen(self.model):
                output: Tensor = self.model(**{**item, "return_dict": False})[0]
        finally:
            self.attend = None
        return output

    def divergence(self, dense: Tensor, other: Tensor) -> float:
        return relative_square(dense, other)

    def outcomes(self, output: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
        return directions(output, draws, generator)

    def losses(self, item: Any, output: Tensor) -> Iterator[Tensor]:
        return iter(())

    def close(self) -> None:
        self.hooks.restore()

    def _attend(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
    ) -> Tensor:
        assert self.attend is not None
        more.pop("config")  # whose settings are being searched
        return self.attend(layer, query, key, value, attn_mask=mask, **more)


def relative_square(dense: Tensor, other: Tensor) -> float:
    """The squared difference, in shares of the squared output."""
    size = dense.double().square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float((other.double() - dense.double()).square().sum() / size)


def directions(output: Tensor, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random ones, such that the mean square of a change along them is twice its relative square."""
    length = math.sqrt(2) / max(float(output.double().norm()), torch.finfo(torch.float64).tiny)
    for _ in range(draws):
        yield (torch.randn(output.shape, generator=generator) * length).to(output)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Weights without gradients, which would keep every layer's inputs in memory."""
    thawed = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in thawed:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in thawed:
            weight.requires_grad_(True)


def _check_ids(item: Any) -> None:
    if not isinstance(item, Tensor) or item.dim() != 2 or item.is_floating_point():
        raise TypeError("an input of a language model must be a tensor of token ids [batch, tokens].")


# ---- attention with gradients


def exact_attention(_: str, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """An `attend` that takes nothing down."""
    return differentiable_attention(query, key, value, **arguments)


def differentiable_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """torch's attention with the arguments of sparge.attention."""
    inputs = prepare_inputs(query.detach(), key.detach(), value.detach(), **arguments)
    swapped = inputs.layout == "BSHD"
    if swapped:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    sight = inputs.visibility
    causal = Visibility(sight.q_len, sight.k_len, sight.device, right=0)
    simple = sight == causal and sight.offset == 0  # torch's fast attention takes no mask
    unmasked = simple or sight == Visibility(sight.q_len, sight.k_len, sight.device)
    seen = None if unmasked else sight.pairs(range(sight.q_len), range(sight.k_len))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=simple, scale=inputs.scale, enable_gqa=inputs.group_size > 1
    )
    return output.transpose(1, 2) if swapped else output
