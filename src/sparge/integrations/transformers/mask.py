"""Masks of transformers by what they mean: causal order, sliding window and key padding, with no matrix made.

transformers describes a mask as a function of (batch, head, row, key), built from parts. `sight_of` reads those parts;
`sparge_mask` turns what it understands into a `PatternMask`, and hands everything else to transformers' own sdpa mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparge.integrations.fallback import FEW_ROWS, constant_when_compiled
from sparge.integrations.transformers.interface import calls_interface, is_model, takes_others
from sparge.library import is_traced
from sparge.visibility import UNBOUNDED, Visibility

IN_PLACE = ("__setitem__", "__iand__", "__ior__", "__ixor__")

_followed: set[type] = set()  # configs whose models were found to follow

MaskFunction = Callable[..., Any]
Sight = tuple[int, int]  # how many keys before and after its own position a row sees


@dataclass(frozen=True)
class Pattern:
    """What rows see of `k_len` keys: the last row stands at key `visible.k_len` - 1, and those after it are hidden."""

    visible: Visibility
    batch: int
    k_len: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.visible.q_len, self.k_len

    def to_dense(self) -> Tensor:
        sight = self.visible
        seen = sight.pairs(range(sight.q_len), range(sight.k_len))
        return torch.nn.functional.pad(seen, (0, self.k_len - sight.k_len)).expand(self.shape)

    def to(self, device: torch.device) -> Pattern:
        valid = self.visible.key_valid
        moved = replace(self.visible, device=device, key_valid=None if valid is None else valid.to(device))
        return replace(self, visible=moved)


class PatternMask(Tensor):
    """The mask that transformers makes for sdpa, bool [B, 1, Nq, Nk], which is not computed until something reads it.

    `pattern` says what it holds. Any operation on it gets the whole mask, so that models may cut and combine it.
    """

    pattern: Pattern | None  # None: the mask was written to, and is no longer this pattern
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, pattern: Pattern) -> PatternMask:
        device = pattern.visible.device
        make: Any = torch.Tensor._make_wrapper_subclass
        mask: PatternMask = make(cls, pattern.shape, dtype=torch.bool, device=device)
        mask.pattern, mask._whole = pattern, None
        return mask

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()

    def whole(self) -> Tensor:
        """The mask as an ordinary tensor, made once."""
        if self._whole is None:
            assert self.pattern is not None
            self._whole = self.pattern.to_dense()
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # shape, dtype, device and their like
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], cls) else None
        if name == "contiguous" and first is not None:
            return first
        if name == "to" and first is not None and first.pattern is not None:
            like = torch.empty(0, dtype=torch.bool, device=first.pattern.visible.device).to(*args[1:], **kwargs)
            if like.dtype == torch.bool:
                return first if like.device == first.device else cls(first.pattern.to(like.device))
        if first is not None and (name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
            first._whole, first.pattern = first.whole().contiguous(), None
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """For what reaches torch past Python's functions: there is no memory behind the mask."""
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def sparge_mask(**arguments: Any) -> Tensor | None:
    """The mask function of attn_implementation="sparge", with the arguments of transformers' sdpa_mask."""
    from transformers.masking_utils import sdpa_mask

    check_model(type(arguments.get("config")))
    pattern = None if is_traced() else _pattern(arguments)  # a tracer cannot read values
    if pattern is None:
        ordinary: Tensor | None = None if is_traced() and _is_plain(arguments) else sdpa_mask(**arguments)
        return ordinary
    sight = pattern.visible
    if sight.key_valid is None and sight.left == UNBOUNDED:
        if sight.right == 0 and sight.offset == 0 and arguments.get("allow_is_causal_skip", True):
            return None  # as sdpa_mask: the layer's own is_causal says it all
        if sight.right == UNBOUNDED and arguments.get("allow_is_bidirectional_skip", False):
            return None
    return PatternMask(pattern)


@constant_when_compiled
def check_model(config: type) -> None:
    """Refuse models that take any implementation's name, but compute attention themselves and cannot read our masks, or
    go wrong under every other implementation than their own."""
    home = config.__module__.replace("configuration_", "modeling_")
    modeling = sys.modules.get(home)
    if config in _followed or modeling is None or home == config.__module__:
        return
    defined = [one for one in vars(modeling).values() if isinstance(one, type) and one.__module__ == home]
    layers = [one for one in defined if "Attention" in one.__name__]
    if layers and not any(map(calls_interface, layers)):
        raise ValueError(
            f"the model of {config.__name__} computes attention itself, and does not follow an attn_implementation "
            "of sparge: leave it as it is, and try sparge.patched."
        )
    models = [one for one in defined if is_model(one) and getattr(one, "config_class", None) is config]
    if models and not any(map(takes_others, models)):
        raise ValueError(
            f'the model of {config.__name__} supports no other attention than its own: use attn_implementation="eager".'
        )
    _followed.add(config)


def sight_of(mask_function: MaskFunction) -> Sight | None:
    """(left, right) of a mask function made of transformers' causal, bidirectional and sliding-window parts."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return UNBOUNDED, 0
    if mask_function is masking_utils.bidirectional_mask_function:
        return UNBOUNDED, UNBOUNDED
    if _is_made_by(mask_function, masking_utils.and_masks):
        sights = [sight_of(part) for part in _captured(mask_function, "mask_functions")]
        known = [sight for sight in sights if sight is not None]
        return (min(s[0] for s in known), min(s[1] for s in known)) if known and len(known) == len(sights) else None
    if _is_made_by(mask_function, masking_utils.sliding_window_overlay):
        return _captured(mask_function, "sliding_window") - 1, UNBOUNDED
    if _is_made_by(mask_function, getattr(masking_utils, "sliding_window_bidirectional_overlay", None)):
        return (_captured(mask_function, "sliding_window"),) * 2
    return None


def _is_made_by(function: MaskFunction, factory: Any) -> bool:
    """Whether `factory` defines this function in its body; None: this version has no such factory."""
    if factory is None:
        return False
    code = getattr(function, "__code__", None)
    return code is not None and any(code is constant for constant in factory.__code__.co_consts)


def _captured(function: MaskFunction, name: str) -> Any:
    """A variable that a function has from where it was made."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def _is_plain(arguments: dict[str, Any]) -> bool:
    """Whether the mask is the causal one of a whole prefill, told from its arguments alone."""
    from transformers.masking_utils import causal_mask_function

    offset = arguments.get("q_offset", 0)
    return bool(
        arguments.get("mask_function", causal_mask_function) is causal_mask_function
        and arguments.get("allow_is_causal_skip", True)
        and arguments.get("attention_mask") is None
        and isinstance(offset, int)
        and offset == 0
        and arguments.get("q_length") is not None
        and arguments.get("q_length") == arguments.get("kv_length")
    )


def _pattern(arguments: dict[str, Any]) -> Pattern | None:
    """None where sparge cannot say the same: other patterns, other alignments, other versions' arguments."""
    rows = _rows(arguments)
    if rows is None or not {"batch_size", "kv_length", "mask_function"} <= arguments.keys():
        return None
    if len(rows) <= FEW_ROWS:  # dense anyway, and transformers may compile decoding steps
        return None
    sight = sight_of(arguments["mask_function"])
    if sight is None:
        return None
    left, right = sight
    k_len, kv_offset = arguments["kv_length"], arguments.get("kv_offset", 0)
    end = rows.stop - kv_offset  # the key where the last row stands, plus one
    if left < UNBOUNDED or right < UNBOUNDED:
        if not 0 < end <= k_len or (right > 0 and end != k_len):
            return None
    else:
        end = k_len
    padding = arguments.get("attention_mask")
    if padding is not None:
        padding = torch.nn.functional.pad(padding, (0, max(0, kv_offset + end - padding.shape[-1])))
        padding = padding[:, kv_offset : kv_offset + end]
        padding = None if bool(padding.all()) else padding
    device = torch.device(arguments.get("device", "cpu"))
    left, right = (UNBOUNDED if side >= end - 1 and side > 0 else side for side in (left, right))  # reach every key
    return Pattern(Visibility(len(rows), end, device, left, right, padding), arguments["batch_size"], k_len)


def _rows(arguments: dict[str, Any]) -> range | None:
    """The positions of the query rows; versions before 5.4 give them one by one."""
    positions = arguments.get("cache_position")
    if positions is None:
        start = int(arguments.get("q_offset", 0))
        return range(start, start + arguments["q_length"]) if "q_length" in arguments else None
    start, stop = int(positions[0]), int(positions[-1]) + 1
    return range(start, stop) if stop - start == len(positions) else None
