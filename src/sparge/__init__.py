"""Training-free sparse and quantised attention for language, image and video models."""

from sparge.api import attention, block_sparse_attention, predict_mask, varlen_attention
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.distributed.context import context_parallel, gather_sequence, shard_sequence
from sparge.distributed.wire import Traffic
from sparge.integrations.diffusers.registration import register_with_diffusers
from sparge.integrations.fallback import DenseAttentionWarning
from sparge.integrations.patch import Patch, Plan, patch, unpatch
from sparge.integrations.torch_sdpa import Calls, patched
from sparge.integrations.transformers.registration import register, register_with_transformers
from sparge.ordering import TokenOrder, token_order
from sparge.profile import Profile
from sparge.stages import Stats
from sparge.tuning.search import tune

__version__ = "0.1.0"

register_with_diffusers()
register_with_transformers()

__all__ = [
    "BlockMask",
    "Calls",
    "DenseAttentionWarning",
    "Patch",
    "Plan",
    "Profile",
    "SparseConfig",
    "Stats",
    "TokenOrder",
    "Traffic",
    "attention",
    "block_sparse_attention",
    "context_parallel",
    "gather_sequence",
    "patch",
    "patched",
    "predict_mask",
    "register",
    "shard_sequence",
    "token_order",
    "tune",
    "unpatch",
    "varlen_attention",
]
