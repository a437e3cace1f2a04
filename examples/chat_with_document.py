"""Questions about a long document: it is read once, sparse, and its KV cache serves every question, dense.

python examples/chat_with_document.py [TOKENS] [QUESTION ...]
"""

import copy
import sys
from pydoc_data.topics import topics  # a long text that every Python has

import torch

import sparge
from sparge.evaluate.models import load_smollm2  # or any model of transformers: from_pretrained(...)

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
questions = sys.argv[2:] or ["What is a try statement for?", "What does the pass statement do?"]
model, tokenizer = load_smollm2()
document = tokenizer("\n\n".join(topics[name] for name in ("try", "pass", "while", "with", "import", "class")))
start = torch.tensor([document.input_ids[: tokens - 128]])

with torch.inference_mode(), sparge.patch(model):
    read = model(start, use_cache=True, logits_to_keep=1).past_key_values
    for question in questions:
        asked = tokenizer(f"\n\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids
        answer = model.generate(
            torch.cat([start, asked], 1), past_key_values=copy.deepcopy(read), max_new_tokens=32, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        print(f"{question}\n  {tokenizer.decode(answer[0, start.shape[1] + asked.shape[1] :]).strip()}")
