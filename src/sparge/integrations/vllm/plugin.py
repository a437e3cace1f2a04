"""What vLLM calls when it starts and finds sparge installed: `--attention-backend CUSTOM` then means sparge."""

from __future__ import annotations

import warnings

BACKEND = "sparge.integrations.vllm.backend.SpargeBackend"


def register() -> None:
    """Only says where the backend is: nothing changes for those who do not ask for it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        warnings.warn(
            f"--attention-backend CUSTOM is {custom.get_path()} already; sparge leaves it at that.", stacklevel=2
        )
        return
    register_backend(custom, BACKEND)
