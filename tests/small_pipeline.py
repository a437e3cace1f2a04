"""A pipeline of diffusers from small configs with random weights: LTX-Video with a text encoder and a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

SIZE = {"height": 64, "width": 96, "num_frames": 9}
GRID = (3, 16, 24)  # of the tokens of that size


def small_pipeline() -> Any:
    torch.manual_seed(0)
    encoder = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("▁cat", -1.0), ("▁dog", -1.0)]
    pipe = diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        tokenizer=transformers.T5Tokenizer(vocabulary, extra_ids=0),
        text_encoder=transformers.T5EncoderModel(encoder).eval(),
        vae=_decoder(),
        transformer=_transformer(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _transformer() -> Any:
    model = diffusers.LTXVideoTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=8, out_channels=8, cross_attention_dim=48,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() == 1:  # some begin at 0 or 1, which would let nothing through
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def _decoder() -> Any:
    four, five = (8,) * 4, (1,) * 5
    scaling = (True, True, False, False)  # 4 x 4 pixels and 4 frames a token
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=four, decoder_block_out_channels=four, layers_per_block=five,
        decoder_layers_per_block=five, spatio_temporal_scaling=scaling, decoder_spatio_temporal_scaling=scaling,
        patch_size=1,
    ).eval()  # fmt: skip
