"""Evaluation of language models, on one that can look things up: damage shows, no sparsity changes nothing."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from copying_model import Words, copying_model, repetitive_text
from problems import refused
from rich.console import Console
from small_models import bloom, built, gemma2, llama, tokens

from sparge import SparseConfig
from sparge.evaluate import language
from sparge.evaluate.language import Variant, evaluate
from sparge.evaluate.models import extend_context
from sparge.evaluate.report import show, to_markdown
from sparge.evaluate.results import DENSE
from sparge.evaluate.tasks import (
    Case,
    greedy_cases,
    multivalue_cases,
    needle_cases,
    perplexity_cases,
    tracking_cases,
)
from sparge.evaluate.texts import BUILT_IN, Encoder, Text, read_texts, windows
from sparge.integrations.transformers.predictions import logits_of
from sparge.tuning.journal import JournalError

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = Text("made", repetitive_text())
SMALL_BLOCKS: dict[str, Any] = {"rule": "topk", "quantization": "none", "block": (64, 32)}
EVERYTHING = Variant("everything", SparseConfig(topk=1.0, **SMALL_BLOCKS))
DAMAGED = Variant("damaged", SparseConfig(topk=0.02, sinks=0, **SMALL_BLOCKS))


@pytest.fixture(scope="module")
def model() -> Any:
    return copying_model()


@pytest.fixture
def encode() -> Encoder:
    return Encoder(Words())


def test_a_damaging_config_loses_needles_and_one_that_keeps_all_loses_none(model: Any, encode: Encoder) -> None:
    results = evaluate(model, needle_cases(encode, [TEXT], 768, depths=8, draws=1), [EVERYTHING, DAMAGED])
    kept, damaged = results.rows()
    assert (kept.dense, kept.sparse, kept.lost, kept.gained) == (1.0, 1.0, 0, 0)
    assert kept.skipped == 0
    assert damaged.dense == 1.0
    assert damaged.sparse <= 0.5
    assert damaged.lost is not None
    assert damaged.lost >= 4
    assert damaged.high < 0.0
    assert damaged.skipped > 0.3


def test_several_keys_are_harder_where_only_the_last_words_tell_them_apart(model: Any, encode: Encoder) -> None:
    cases = needle_cases(encode, [TEXT], 512, depths=6, draws=1, keys=3)
    row = evaluate(model, cases, [EVERYTHING]).rows()[0]
    assert row.on == "3 keys"
    assert row.dense < 1.0


def test_damage_raises_perplexity_where_there_is_something_to_look_up(model: Any, encode: Encoder) -> None:
    cases = perplexity_cases(encode, [TEXT], 768, 2)
    results = evaluate(model, cases, [EVERYTHING, DAMAGED])
    kept, damaged = results.rows()
    assert kept.change == pytest.approx(0, abs=1e-5)
    assert kept.divergence == pytest.approx(0, abs=1e-5)
    assert kept.same == 1.0
    assert damaged.change > 0.1
    assert damaged.low < damaged.change < damaged.high
    assert damaged.divergence > 0.01
    assert damaged.same < 0.9
    first, last = (results.cases[0].readings[DENSE].losses[place] for place in (0, -1))
    assert last < first - 0.5  # by position: the second half repeats the first


def test_what_sparge_leaves_dense_is_equal_to_the_bit(model: Any, encode: Encoder) -> None:
    cases = [
        *perplexity_cases(encode, [TEXT], 512, 1), *needle_cases(encode, [TEXT], 512, 2, 1),
        *multivalue_cases(encode, [TEXT], 512, 1, 1, values=2), *tracking_cases(encode, [TEXT], 512, 1, 1, hops=2),
        *greedy_cases(encode, [TEXT], 512, 1, 6),
    ]  # fmt: skip
    results = evaluate(model, cases, [Variant("default")])
    assert results.all_dense() == ["default"]
    for case in results.cases:
        dense, sparse = case.readings[DENSE], case.readings["default"]
        assert (dense.loss, dense.losses) == (sparse.loss, sparse.losses)
        assert dense.score == sparse.score
        assert sparse.executed == sparse.visible > 0
        assert dense.visible == 0


def test_losses_and_divergence_are_those_of_the_logits(encode: Encoder) -> None:
    model = built(llama)
    ids = tuple(tokens()[0].tolist())
    results = evaluate(model, [Case("ppl", "one", ids, {"text": "x", "tokens": len(ids)})], [DAMAGED])
    with torch.no_grad():
        dense = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        with language.patch(model, DAMAGED.config):
            sparse = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = torch.tensor(ids[1:])
    readings = results.cases[0].readings
    for way, log in ((DENSE, dense), ("damaged", sparse)):
        loss = torch.nn.functional.nll_loss(log, wanted).item()
        assert readings[way].loss == pytest.approx(loss, abs=1e-5)
    divergence = torch.nn.functional.kl_div(sparse, dense, reduction="batchmean", log_target=True).item()
    assert divergence > 5e-5
    assert readings["damaged"].divergence == pytest.approx(divergence, rel=1e-2)
    same = (dense.argmax(-1) == sparse.argmax(-1)).float().mean().item()
    assert readings["damaged"].same == pytest.approx(same, abs=0.02)
    assert results.rows()[0].dense == pytest.approx(math.exp(readings[DENSE].loss))


@pytest.mark.filterwarnings("ignore::sparge.DenseAttentionWarning")
def test_logits_are_those_of_the_model_whatever_it_does_to_them() -> None:
    model = built(gemma2)
    model.config.final_logit_softcapping = 0.5
    with torch.no_grad():
        ids = tokens()[:1]
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[0]
        got, want = logits_of(model, hidden), model(ids, use_cache=False).logits[0]
    assert want.abs().max() <= 0.5
    torch.testing.assert_close(got, want)


def test_greedy_continuations_are_those_of_generate(encode: Encoder) -> None:
    model = built(llama)
    ids = tokens()[:1]
    case = Case("greedy", "one", tuple(ids[0].tolist()), new_tokens=5)
    with torch.no_grad():
        made = language._continue(model, case, None).output
    want = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made.tolist() == want[0, -5:].tolist()


def test_greedy_agreement_counts_equal_tokens() -> None:
    judged = language._judge_continuation(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 5, 4]))
    assert judged == {"score": 0.75, "equal_until": 2}


def test_ctrl_c_keeps_what_was_done_and_the_journal_goes_on(model: Any, encode: Encoder, tmp_path: Path) -> None:
    cases = needle_cases(encode, [TEXT], 256, depths=4, draws=1)
    steps: list[str] = []

    def stop(what: str, read: int) -> None:
        steps.append(what)
        if len([step for step in steps if step.endswith("damaged")]) == 2:
            raise KeyboardInterrupt

    journal = tmp_path / "journal"
    first = evaluate(model, cases, [DAMAGED], journal=journal, on_step=stop)
    assert first.interrupted
    assert len(first.cases) == 1
    again: list[str] = []
    second = evaluate(model, cases, [DAMAGED], journal=journal, on_step=lambda what, read: again.append(what))
    assert not second.interrupted
    assert second.cases[0] == first.cases[0]  # not measured again: even the seconds are those of the first time
    assert len([step for step in again if step.endswith("kept")]) == 1
    assert len(second.cases) == 4
    with refused(JournalError, "delete it or name another"):
        evaluate(model, cases, [EVERYTHING], journal=journal)


def test_results_as_json_and_markdown(model: Any, encode: Encoder) -> None:
    cases = [*perplexity_cases(encode, [TEXT, Text("other", TEXT.content)], 512, 1)]
    results = evaluate(model, cases, [EVERYTHING, Variant("wide", SparseConfig(gap=math.inf))], name="copies")
    facts = json.loads(results.to_json())
    assert [row["on"] for row in facts["rows"]] == ["made", "other", "all 2"] * 2
    assert facts["variants"]["wide"]["config"]["gap"] == "inf"
    shown = to_markdown(results)
    assert shown.startswith("# copies")
    assert shown.count("ppl 512, all 2") == 2
    assert "Perplexity by position, 512 tokens" in shown
    assert "2 of 2 attention layers sparse" in shown


@pytest.mark.parametrize(("width", "framed"), [(80, False), (200, True)])
def test_every_figure_can_be_read_in_a_narrow_terminal_too(
    model: Any, encode: Encoder, width: int, framed: bool
) -> None:
    cases = [*needle_cases(encode, [TEXT], 512, 4, 1), *greedy_cases(encode, [TEXT], 512, 1, 4)]
    results = evaluate(model, cases, [DAMAGED])
    console = Console(width=width, file=io.StringIO())
    show(results, console)
    shown = console.file.getvalue()
    assert ("│" in shown) == framed
    assert "…" not in shown
    needle, greedy = results.rows()
    for figure in (f"{needle.change:+.1%}", f"{needle.low:+.1%}", f"{needle.skipped:.1%}", f"{greedy.sparse:.1%}"):
        assert figure in shown


def test_cases_have_exactly_their_length_and_their_answers(encode: Encoder) -> None:
    words = encode.tokenizer
    cases = [
        *needle_cases(encode, [TEXT], 300, 3, 2, keys=2), *multivalue_cases(encode, [TEXT], 300, 2, 1, values=3),
        *tracking_cases(encode, [TEXT], 300, 2, 1, hops=3),
    ]  # fmt: skip
    spelled = {number: word for word, number in words.known.items()}
    for case in cases:
        assert len(case.ids) == 300
        asked = {"needle": 1, "multivalue": 3, "tracking": 4}[case.task]
        assert len(case.answers) == asked
        for start, stop in case.answers:
            answer = case.ids[start:stop]
            assert answer[0] in case.ids[: case.answers[0][0]], spelled[answer[0]]  # it is in the text
    assert len({case.name for case in cases}) == len(cases)
    places = [case.ids.index(words.known["special"]) for case in needle_cases(encode, [TEXT], 300, 3, 1)]
    assert places == sorted(places)
    assert places[0] < 10 < places[1] - places[0]
    assert needle_cases(encode, [TEXT], 300, 3, 2, 2) == cases[:6]  # by the seed
    assert needle_cases(encode, [TEXT], 300, 3, 2, 2, seed=1) != cases[:6]


def test_draws_take_the_texts_in_turn(encode: Encoder) -> None:
    cases = needle_cases(encode, [TEXT, Text("second", TEXT.content)], 256, 1, 3)
    assert [case.facts["text"] for case in cases] == ["made", "second", "made"]


def test_what_a_tokenizer_puts_first_stays_first() -> None:
    class Starting(Words):
        bos_token_id = 0

        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
            ids = [1 + one for one in super().__call__(text)["input_ids"]]
            return {"input_ids": [0, *ids] if add_special_tokens else ids}

    encode = Encoder(Starting())
    for case in (*perplexity_cases(encode, [TEXT], 256, 2), *needle_cases(encode, [TEXT], 256, 2, 1)):
        assert (case.ids[0], case.ids.count(0), len(case.ids)) == (0, 1, 256)


def test_windows_do_not_overlap() -> None:
    found = windows("text", list(range(100)), 10, 4)
    assert [window[0] for window in found] == [0, 20, 50, 70]
    with refused(ValueError, "text holds 10 windows"):
        windows("text", list(range(100)), 10, 11)


def test_built_in_texts_are_long_and_files_are_read(tmp_path: Path) -> None:
    assert all(len(text.content) > 300_000 for text in read_texts(BUILT_IN))
    file = tmp_path / "novel.txt"
    file.write_text("Once", encoding="utf-8")
    assert read_texts([str(file)]) == [Text("novel", "Once")]
    with refused(ValueError, "two texts are called novel"):
        read_texts([str(file), str(file)])
    file.write_bytes(b"\xff\xfe\x00")
    with refused(ValueError, "not a UTF-8 text"):
        read_texts([str(file)])


def test_impossible_cases_are_one_sentence(model: Any, encode: Encoder) -> None:
    with refused(ValueError, "leave no room"):
        needle_cases(encode, [TEXT], 20, 1, 1)
    with refused(ValueError, "made holds"):
        needle_cases(encode, [TEXT], 10_000, 1, 1)
    with refused(ValueError, "keys must lie"):
        needle_cases(encode, [TEXT], 256, 1, 1, keys=100)
    with refused(ValueError, "at least one case"):
        evaluate(model, [])
    with refused(ValueError, "there twice"):
        evaluate(model, needle_cases(encode, [TEXT], 256, 1, 1) * 2)
    with refused(ValueError, "cannot be called dense"):
        Variant("dense")


def test_models_that_cannot_be_judged_are_one_sentence(encode: Encoder) -> None:
    cases = perplexity_cases(encode, [TEXT], 256, 1)
    model = copying_model()
    with refused(ValueError, "training mode"):
        evaluate(model.train(), cases)
    with refused(TypeError, "not Linear"):
        evaluate(torch.nn.Linear(2, 2), cases)
    with torch.no_grad():
        model.eval().lm_head.weight[0, 0] = math.nan
    with refused(ValueError, "not finite"):
        evaluate(model, cases)
    model.set_attn_implementation("sparge")
    with refused(ValueError, "sparse already"):
        evaluate(model, cases)


def test_yarn_is_that_of_transformers() -> None:
    model = built(llama)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "rope_theta": 10_000.0}
    want = built(llama, rope_parameters=scaling, max_position_embeddings=2048)
    want.load_state_dict(model.state_dict())
    ids = tokens(1500)[:1]
    with torch.no_grad():
        plain = model(ids).logits
        extend_context(model, 2)
        torch.testing.assert_close(model(ids).logits, want(ids).logits)
        assert not torch.allclose(model(ids).logits, plain)
    assert model.config.max_position_embeddings == 2048
    with refused(ValueError, "no plain rotary positions"):
        extend_context(model, 2)
    with refused(ValueError, "above 1"):
        extend_context(built(llama), 1)
    with refused(ValueError, "no plain rotary positions"):
        extend_context(built(bloom), 2)
