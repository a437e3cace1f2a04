"""The name "sparge" among transformers' attention implementations, without importing transformers for it."""

from __future__ import annotations

import sys

from sparge.integrations.after_import import after_import
from sparge.integrations.transformers.attention import NAME, sparge_attention
from sparge.integrations.transformers.interface import register_attention
from sparge.integrations.transformers.mask import sparge_mask

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
    after_import(HOME, _register_if_known)


def _register_if_known() -> None:
    """A transformers that is too old has no name to register: it will refuse "sparge" itself."""
    package = sys.modules["transformers"]
    if all(hasattr(package, name) for name in ("AttentionInterface", "AttentionMaskInterface")):
        register()
