"""A language model that can look things up, built by hand: after two tokens it says what followed them last time.

Two heads of the first layer see one and two tokens back. A head of the second finds the places that followed the same
two tokens, and copies what stands there. So it finds needles and predicts repetitions, unless attention skips them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

WORDS = 160  # the vocabulary, and the width of each of the four parts of the hidden state
HEAD = 128
STILL = 64  # of a head's channels, those in the slower half of both halves hardly turn with position
SHARP = 80.0  # of attention's choices
LOUD = 12.0  # of its predictions


class Words:
    """A tokenizer: every word, number and mark is one token, numbered as they come."""

    bos_token_id = None

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        found = re.findall(r"\w+|[^\w\s]", text)
        ids = [self.known.setdefault(word, len(self.known) % WORDS) for word in found]
        return {"input_ids": ids}


def copying_model(max_tokens: int = 4096) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=4 * WORDS, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=HEAD, max_position_embeddings=max_tokens, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8}, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
        here, before, earlier, copied = (slice(part * WORDS, (part + 1) * WORDS) for part in range(4))
        model.model.embed_tokens.weight[:, here] = torch.eye(WORDS)
        model.lm_head.weight[:, copied] = LOUD * torch.eye(WORDS)
        _see_back(model.model.layers[0].self_attn, here, (before, earlier))
        _copy(model.model.layers[1].self_attn, here, before, earlier, copied)
    return model


def _see_back(layer: Any, here: slice, targets: tuple[slice, slice]) -> None:
    """Head n attends n + 1 tokens back: its query is its key, turned on by as many steps."""
    for head, target in enumerate(targets):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query, key = _turned(0.0), _turned(float(head + 1))
        layer.q_proj.weight[rows, here] = query[:, None].expand(-1, WORDS)
        layer.k_proj.weight[rows, here] = key[:, None].expand(-1, WORDS)
        _carry(layer, head, here, target)


def _turned(steps: float) -> Tensor:
    """A key that is seen best from `steps` later: all frequencies in phase there."""
    half = HEAD // 2
    angles = steps * (1e8 ** (-torch.arange(half) / half))
    size = SHARP**0.5 / 2
    return size * torch.cat([angles.cos(), angles.sin()])


def _copy(layer: Any, here: slice, before: slice, earlier: slice, copied: slice) -> None:
    """Head 0 attends to tokens whose two predecessors are this token and the one before it."""
    codes = torch.randn(WORDS, STILL, generator=torch.Generator().manual_seed(1)).sign() * (SHARP / STILL) ** 0.5
    half, slow = HEAD // 2, HEAD // 4
    channels = torch.cat([torch.arange(half - slow, half), torch.arange(HEAD - slow, HEAD)])
    first, second = codes.clone(), codes.clone()
    first[:, 1::2] = 0  # even channels compare the nearer token, odd ones the farther
    second[:, 0::2] = 0
    layer.q_proj.weight[channels[:, None], torch.arange(WORDS)[None] + here.start] = first.T
    layer.q_proj.weight[channels[:, None], torch.arange(WORDS)[None] + before.start] = second.T
    layer.k_proj.weight[channels[:, None], torch.arange(WORDS)[None] + before.start] = first.T
    layer.k_proj.weight[channels[:, None], torch.arange(WORDS)[None] + earlier.start] = second.T
    _carry(layer, 0, here, copied)


def _carry(layer: Any, head: int, source: slice, target: slice) -> None:
    """What a head attends to, moved from one part of the hidden state to another.

    A head has fewer channels than there are words, so words travel as codes, and are read back by them.
    """
    codes = torch.nn.functional.normalize(
        torch.randn(WORDS, HEAD, generator=torch.Generator().manual_seed(2 + head)), dim=-1
    )
    rows = slice(head * HEAD, (head + 1) * HEAD)
    layer.v_proj.weight[rows, source] = codes.T
    layer.o_proj.weight[target, rows] = codes


def repetitive_text(words: int = 400, times: int = 6) -> str:
    """Random words, repeated: nothing to predict at first, everything later."""
    drawn = torch.randint(60, (words,), generator=torch.Generator().manual_seed(0)).tolist()
    return " ".join([" ".join(f"w{word}" for word in drawn)] * times)
