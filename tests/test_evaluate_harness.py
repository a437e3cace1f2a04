"""lm-evaluation-harness on a patched model: a model like any other to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from copying_model import WORDS, copying_model, transformers

import sparge
from sparge.observe import observed

WHERE = "the harness is no dependency: pip install 'lm_eval[hf]'"
lm_eval = pytest.importorskip("lm_eval", reason=WHERE)
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=WHERE)
tokenizers = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
EVERYTHING = sparge.SparseConfig(rule="topk", topk=1.0, quantization="none", block=(64, 32))
DAMAGED = sparge.SparseConfig(rule="topk", topk=0.02, sinks=0, quantization="none", block=(64, 32))


def words() -> Any:
    known = {"[UNK]": 0, "[EOS]": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[EOS]")


def write_questions(path: Path) -> None:
    """Two words from far back come again; what followed them is the answer."""
    rows = []
    for number in range(6):
        filler, place = [f"w{20 + place % 7}" for place in range(600)], 20 + 50 * number
        fact = [f"w{4 + number}", f"w{10 + number}", f"w{130 + number}"]
        rows.append({"context": " ".join([*filler[:place], *fact, *filler[place:], *fact[:2]]), "answer": fact[2]})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_the_harness_sees_what_sparsity_does(tmp_path: Path) -> None:
    write_questions(tmp_path / "questions.jsonl")
    files = {"data_files": {"test": str(tmp_path / "questions.jsonl")}, "cache_dir": str(tmp_path)}
    model = copying_model()
    harness = huggingface.HFLM(pretrained=model, tokenizer=words(), batch_size=1, max_length=2048)
    task = {
        "task": "recall", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test",
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": " {{answer}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip

    def accuracy() -> float:
        found = lm_eval.simple_evaluate(harness, tasks=[task], bootstrap_iters=0, log_samples=False)
        return float(found["results"]["recall"]["acc,none"])

    dense = accuracy()
    with sparge.patch(model, EVERYTHING), observed() as seen:
        kept = accuracy()
    with sparge.patch(model, DAMAGED):
        damaged = accuracy()
    assert seen.visible > 0
    assert dense == kept > 0.8
    assert damaged < 0.5
