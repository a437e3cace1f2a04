"""Q, K and V of a real model: made from SmolLM2, kept in a safetensors file, read for the `real` masks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Captured:
    """Tensors [heads, tokens, head_dim] of one layer, and whether the model attends causally."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    source: str

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.key.shape[0]


def read_captured(path: Path) -> Captured:
    """Tensors q, k and v; the file's metadata may say causal = true (else attention is full) and name a source."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"there is no file {path}; `sparge capture {path}` makes one from SmolLM2.")
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, str] = file.metadata() or {}
            missing = {"q", "k", "v"} - set(file.keys())
            if missing:
                raise ValueError(
                    f"{path} lacks the tensors {', '.join(sorted(missing))}; it needs q, k and v [H, N, D]."
                )
            query, key, value = (file.get_tensor(name) for name in ("q", "k", "v"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}).") from error
    shapes = [tuple(x.shape) for x in (query, key, value)]
    fit = all(len(shape) == 3 for shape in shapes) and shapes[1] == shapes[2] and shapes[0][1:] == shapes[1][1:]
    if not fit or shapes[0][0] % shapes[1][0]:
        raise ValueError(f"{path}: q, k and v must be [H, N, D] of one length and fitting heads, not {shapes}.")
    return Captured(query, key, value, facts.get("causal") == "true", facts.get("source", path.name))


@torch.inference_mode()
def capture_smollm2(path: Path, tokens: int, layer: int) -> Captured:
    """One layer of SmolLM2-135M reading the document of `sparge demo`."""
    from safetensors.torch import save_file

    from sparge.demo import make_document
    from sparge.evaluate.models import SMOLLM2_NAME, load_smollm2
    from sparge.integrations.transformers.interface import register_attention

    model, tokenizer = load_smollm2()
    if not 0 <= layer < model.config.num_hidden_layers:
        raise ValueError(f"layer must lie from 0 to {model.config.num_hidden_layers - 1}, not {layer}.")
    seen: dict[str, Tensor] = {}

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        assert mask is None, "a whole prefill has no mask but the causal one"
        if module.layer_idx == layer:
            seen.update(q=query[0], k=key[0], v=value[0])
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    register_attention("sparge_capture", record)
    model.set_attn_implementation("sparge_capture")
    model.model.layers = model.model.layers[: layer + 1]  # later layers would change nothing
    model.model(make_document(tokenizer, tokens).ids, use_cache=False)
    facts = {"causal": "true", "source": f"{SMOLLM2_NAME}, layer {layer}"}
    kept = {name: x.to(torch.bfloat16).contiguous() for name, x in seen.items()}
    save_file(kept, path, metadata=facts)
    return Captured(kept["q"], kept["k"], kept["v"], True, facts["source"])
