"""The attention layers of a model of diffusers, and what sparge would do with each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from sparge.config import SparseConfig
from sparge.inputs import DTYPES
from sparge.integrations.diffusers.families import Family, family_of
from sparge.integrations.layers import ALONE, DENSE, SPARSE, Layer, LayerSettings, head_dim_refusal, settings_of
from sparge.profile import Profile

STRANGER = "sparge does not know where text and pictures stand in this model"


def attention_layers(model: Any, config: SparseConfig | None, profile: Profile | None, prefix: str = "") -> list[Layer]:
    """Every attention layer of a model, in its order; `prefix` comes before the names."""
    family = family_of(model)
    return [
        _layer(name, prefix, module, family, config, profile)
        for name, module in model.named_modules()
        if _computes_attention(module)
    ]


def _computes_attention(module: Any) -> bool:
    """As diffusers tells it in set_attention_backend."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    return isinstance(module, (Attention, MochiAttention, AttentionModuleMixin))


def _layer(
    name: str, prefix: str, module: Any, family: Family | None, config: SparseConfig | None, profile: Profile | None
) -> Layer:
    heads = getattr(module, "heads", None)
    head_dim = module.inner_dim // heads if heads and hasattr(module, "inner_dim") else None

    def layer(action: str, why: str, settings: LayerSettings | None = None, as_meant: bool = False) -> Layer:
        return Layer(prefix + name, type(module).__name__, heads, head_dim, action, why, settings, as_meant)

    if family is None:
        return layer(ALONE, STRANGER)
    if not any(fnmatchcase(name, pattern) for pattern in family.layers):
        return layer(ALONE, family.others, as_meant=True)
    settings = settings_of(prefix + name, config, profile)
    if settings.config is None:
        return layer(DENSE, "the profile does not name it, and no config is given", settings)
    if heads is not None:
        settings.config.check_heads(heads)
    reason = head_dim_refusal(head_dim)
    if reason is not None:
        return layer(DENSE, reason, LayerSettings(None))
    weight = next((x for x in module.parameters() if x.is_floating_point()), None)
    if weight is not None and weight.dtype not in DTYPES:  # a model may be converted later: its calls will tell
        return layer(DENSE, f"{weight.dtype} is not float16, bfloat16 or float32", settings)
    by = "as the profile says" if settings.tuned else f"rule {' or '.join(settings.config.rule)}"
    return layer(SPARSE, f"{by}, Hilbert order", settings)
