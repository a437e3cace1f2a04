"""Training-free sparse and quantised attention for language, image and video models."""

from sparge.api import attention, block_sparse_attention, predict_mask, varlen_attention
from sparge.block_mask import BlockMask
from sparge.config import SparseConfig
from sparge.ordering import TokenOrder, token_order
from sparge.profile import Profile
from sparge.stages import Stats
from sparge.tuning.search import tune

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Profile",
    "SparseConfig",
    "Stats",
    "TokenOrder",
    "attention",
    "block_sparse_attention",
    "predict_mask",
    "token_order",
    "tune",
    "varlen_attention",
]
