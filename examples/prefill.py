"""Prefill of a language model, dense and sparse: time, and whether both expect the same next tokens.

python examples/prefill.py [TOKENS]
"""

import sys
import time
from pydoc_data.topics import topics  # a long text that every Python has

import torch

import sparge
from sparge.evaluate.models import load_smollm2  # or any model of transformers: from_pretrained(...)
from sparge.observe import observed

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
model, tokenizer = load_smollm2()
text = "\n\n".join(topics.values())[: 8 * tokens]  # enough
ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


def prefill() -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    best = model(ids, use_cache=False, logits_to_keep=256).logits.argmax(-1)
    return best, time.perf_counter() - start


with torch.inference_mode():
    dense, dense_seconds = prefill()
    with sparge.patch(model), observed() as seen:
        sparse, sparse_seconds = prefill()

print(f"{tokens} tokens: {dense_seconds:.1f} s dense, {sparse_seconds:.1f} s sparse")
print(f"{1 - seen.executed / seen.visible:.0%} of visible blocks skipped, {dict(seen.backends)}")
print(f"same most likely next token at {(dense == sparse).float().mean():.1%} of the last 256 places")
