"""The name "sparge" among transformers' attention implementations, without importing transformers for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from sparge.integrations.transformers.attention import sparge_attention
from sparge.integrations.transformers.interface import register_attention
from sparge.integrations.transformers.mask import sparge_mask

NAME = "sparge"
HOME = "transformers.modeling_utils"  # where transformers keeps its table of attention functions


def register() -> None:
    """Make attn_implementation="sparge" known to transformers now; `import sparge` does so by itself.

    Raises ImportError where transformers is missing, or older than its attention and mask interfaces.
    """
    try:
        register_attention(NAME, sparge_attention, sparge_mask)
    except ImportError as error:
        raise ImportError(f"sparge works with transformers from 5.0 on ({error}).") from error


def register_with_transformers() -> None:
    """`register` when transformers is there, or as soon as it is imported."""
    if sys.modules.get(HOME) is not None:
        _register_if_known()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_if_known() -> None:
    """A transformers that is too old has no name to register: it will refuse "sparge" itself."""
    package = sys.modules["transformers"]
    if all(hasattr(package, name) for name in ("AttentionInterface", "AttentionMaskInterface")):
        register()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as all other finders would, and registers once it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register_if_known()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
