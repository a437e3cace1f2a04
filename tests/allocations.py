"""What a piece of code allocates: the size of every new tensor, seen where torch dispatches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """`with LargestTensor() as seen:` and then `seen.bytes`, of the largest storage that came into being inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        old = {_place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _place(x) not in old:  # neither a view nor written in place
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
