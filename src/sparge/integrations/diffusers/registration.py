"""The name "sparge" among the attention backends of diffusers, without importing diffusers for it."""

from __future__ import annotations

from typing import Any

from sparge.integrations.after_import import after_import
from sparge.integrations.diffusers.backend import NAME, sparge_backend

HOME = "diffusers.models.attention_dispatch"
NEEDED = ("AttentionBackendName", "_AttentionBackendRegistry", "dispatch_attention_fn")


def register_with_diffusers() -> None:
    """Make set_attention_backend("sparge") known when diffusers is there, or as soon as it is imported."""
    after_import(HOME, _register_if_known)


def register() -> Any:
    """Make the name known now, and return diffusers' own constant for it."""
    from diffusers.models import attention_dispatch as host

    missing = [name for name in NEEDED if not hasattr(host, name)]
    if missing:
        raise ImportError(f"sparge works with diffusers from 0.35 on ({HOME} has no {missing[0]}).")
    names: Any = host.AttentionBackendName
    if NAME not in names._value2member_map_:
        _add_member(names)
    backend = names(NAME)
    host._AttentionBackendRegistry.register(backend, supports_context_parallel=True)(sparge_backend)
    return backend


def _register_if_known() -> None:
    """A diffusers without a dispatcher has no name to register: it will refuse "sparge" itself."""
    try:
        register()
    except ImportError:
        return


def _add_member(names: Any) -> None:
    """diffusers' backend names are a closed enumeration, which has no other way in."""
    member = str.__new__(names, NAME)
    member._name_, member._value_, member._sort_order_ = "SPARGE", NAME, len(names)
    names._member_names_.append("SPARGE")
    names._member_map_["SPARGE"] = member
    names._value2member_map_[NAME] = member
    type.__setattr__(names, "SPARGE", member)
