"""Several processes share a sequence: results, masks and stats are those of one process, and no rank waits for ever."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import problem, relative_l1, tensors, without_probe
from ranks import run_ranks
from shard_cases import CASES, EXACT, events_between, refused_calls, run_cases, run_hosts
from torch.distributed.device_mesh import init_device_mesh

import sparge
from sparge import reference
from sparge.distributed.cost import Workload, cost
from sparge.distributed.sharding import split_evenly
from sparge.distributed.wire import BUDGET, KEYS_AND_VALUES, PROBE, Team

pytestmark = pytest.mark.usefixtures("one_thread")

# Partial results are merged: int8 weights are rounded beside another maximum, and so are e4m3 ones.
ERROR = {"none": 2e-5, "int8": 0.004, "int8-fp8": 0.015}


@functools.cache
def outcome(world: int) -> tuple[list[dict], dict[int, object]]:
    """Of every case for as many ranks, rank by rank; all run in one set of processes. And how those ended."""
    with tempfile.TemporaryDirectory() as folder:
        ends = run_ranks(save_cases, world, folder, expect_deaths=2 if world == 4 else 0)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)], ends


def results(world: int) -> list[dict]:
    return outcome(world)[0]


def save_cases(rank: int, world: int, folder: str) -> str | None:
    found = run_cases(rank, world)
    if world == 2:
        found |= {"hosts": run_hosts(), "refusals": call_refused(rank)}
    torch.save(found, Path(folder) / f"{rank}.pt")
    return die_or_keep_silent(rank) if world == 4 else None


def shards_of(name: str) -> list[dict]:
    found = [of_rank[name] for of_rank in results(CASES[name].ranks)]
    for shard in found:
        if isinstance(shard, Exception):
            raise shard
    return found


def put_together(shards: list[dict], what: str, dim: int) -> torch.Tensor:
    """The shards' rows in the order of the sequence."""
    rows = torch.tensor([row for shard in shards for row in shard["rows"]])
    return torch.cat([shard[what] for shard in shards], dim).index_select(dim, rows.argsort())


@pytest.mark.parametrize("name", CASES)
def test_shards_together_are_what_one_process_computes(name):
    case, shards = CASES[name], shards_of(name)
    want, want_lse, want_stats = case.run_alone()
    packed = case.ends is not None
    got, lse = put_together(shards, "values", 0 if packed else 2), put_together(shards, "lse", 1 if packed else 2)
    assert got.dtype == want.dtype
    quantization = want_stats.quantization
    whole = want.isfinite()
    assert torch.equal(got.isfinite(), whole)
    limit = ERROR[quantization] + (0.008 if want.dtype == torch.bfloat16 else 0.0)
    if case.config.pv_threshold is None or case.mesh[0] == 1:
        assert relative_l1(got[whole], want[whole]) < limit
        torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=0, equal_nan=True)
    for shard in shards:
        stats = shard["stats"]
        assert torch.equal(stats.executed, want_stats.executed)
        assert torch.equal(stats.visible, want_stats.visible)
        assert (stats.backend, stats.quantization) == (want_stats.backend, quantization)
        assert f"a ring of {case.mesh[0]} by {case.mesh[1]}" in stats.reason


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in CASES.items()
        if case.mesh[0] > 1 and case.ends is None and case.config.max_error is None  # which may take a second round
    ],
)
def test_the_rings_masks_are_those_of_one_process(name):
    case = CASES[name]
    q, k, v = case.whole()
    valid = case.padding(k.shape[2])
    arguments = {name: value for name, value in case.arguments.items() if name in ("is_causal", "window")}
    inputs = problem(q, k, v, key_valid=None if valid is None else valid.expand(q.shape[0], -1), **arguments)
    want = reference.select(reference.summarize(inputs, case.config), case.config).to_dense()
    columns, rows = case.mesh[1], case.config.block[0]
    per_rank = q.shape[1] // columns
    rows_seen = 0
    for rank, shard in enumerate(shards_of(name)):
        heads = slice(rank % columns * per_rank, (rank % columns + 1) * per_rank)
        for start, stop, mask in shard["masks"]:
            assert torch.equal(mask, want[:, heads, start // rows : -(-stop // rows)])
            rows_seen += stop - start
    assert rows_seen == q.shape[2] * columns


def test_most_cases_skip_blocks():
    skipping = [name for name, case in CASES.items() if shards_of(name)[0]["stats"].sparsity > 0.1]
    assert len(skipping) > len(CASES) / 2


def test_ulysses_is_bit_equal_in_floating_point():
    for name in ("ulysses", "ulysses one key head", "ulysses second stage"):
        want, _, stats = CASES[name].run_alone()
        assert torch.equal(put_together(shards_of(name), "values", 2), want)
        assert torch.equal(shards_of(name)[0]["stats"].skipped_pv, stats.skipped_pv)
    assert stats.skipped_pv.sum() > 0


def test_the_rings_second_stage_skips_no_more_and_errs_no_more_than_one_process():
    case, shards = CASES["ring second stage"], shards_of("ring second stage")
    filtered, _, stats = case.run_alone()
    exact, _ = reference.dense(problem(*case.whole()))
    skipped = shards[0]["stats"].skipped_pv
    assert (skipped <= stats.skipped_pv).all()
    assert skipped.sum() > 0
    assert relative_l1(put_together(shards, "values", 2), exact) <= relative_l1(filtered, exact) * 1.05


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.config.max_error is not None])
def test_a_budget_redoes_the_heads_that_one_process_redoes(name):
    want = CASES[name].run_alone()[2]
    for shard in shards_of(name):
        assert torch.equal(shard["stats"].redone, want.redone)
        torch.testing.assert_close(shard["stats"].error, want.error, atol=1e-5 if "fp8" not in name else 0.004, rtol=0)
    assert want.redone.any() == ("kept" not in name)
    if name != "ulysses budget":
        assert not want.redone.all()


def test_a_budget_in_a_ring_moves_keys_again_only_for_heads_over_it():
    """Half of the key heads are over it: the second round moves half of what moves where everything is kept."""
    kept, redone, everything, without = (
        shards_of(name)[0]["sent"] for name in ("ring budget that is kept", "ring budget", "all, ring", "ring")
    )
    assert redone[KEYS_AND_VALUES] - kept[KEYS_AND_VALUES] == everything[KEYS_AND_VALUES] / 2 > 0
    assert redone[BUDGET] > kept[BUDGET] > 0  # the new result is judged too
    assert BUDGET not in without


PROBED = [
    name
    for name, case in CASES.items()
    if "probe" in case.config.rule and case.config.max_error is None and case.mesh[0] > 1
]


@pytest.mark.parametrize("name", PROBED)
def test_the_probe_of_a_ring_keeps_blocks_that_scores_do_not(name):
    """Without which the tests of masks would not tell whether it was asked."""
    case, shards = CASES[name], shards_of(name)
    by_scores = replace(case, config=without_probe(case.config)).run_alone()[2]
    assert shards[0]["stats"].executed.sum() > by_scores.executed.sum()
    assert sum(shard["sent"][PROBE] for shard in shards) > 0
    assert PROBE not in shards_of("ring")[0]["sent"]


# ---- what moves


def test_keys_and_values_go_only_to_ranks_that_need_them():
    """A window of 100 keys over 4 x 128 tokens: each rank needs its own unit and the one before."""
    name = "ring of four, windowed"
    unit = 2 * 4 * 128 * 16 * 4  # K and V, heads, keys, channels, float32
    sent = [shard["sent"]["keys and values"] for shard in shards_of(name)]
    assert sent == [unit, unit, unit, 0]


def test_zigzag_balances_causal_attention():
    def pairs_of_ranks(sharding: str) -> list[int]:
        shares = split_evenly(4096, 4, sharding)
        return [sum(row + 1 for interval in share for row in range(*interval)) for share in shares]

    assert len(set(pairs_of_ranks("zigzag"))) == 1
    contiguous = pairs_of_ranks("contiguous")
    assert max(contiguous) > 1.7 * sum(contiguous) / 4


def test_quantised_shards_travel_in_eight_bits():
    plain, fp8 = (shards_of(name)[1]["sent"]["keys and values"] for name in ("ring causal zigzag", "ring fp8"))
    per_unit = 4 * 128 * 32 + 4 * 128 * 16 + 4 * 2 * 4  # int8 K padded to 32 channels, e4m3 V, float32 scales
    assert fp8 % per_unit == 0
    assert plain % (2 * 2 * 128 * 16 * 4) == 0


def test_the_next_shard_is_on_its_way_while_one_is_computed():
    for shard in shards_of("ring of four, wide blocks"):
        between = events_between(shard["events"], "start", "wait")
        assert len(between) == 3
        assert all(events["_merge"] for events in between)


def test_aligned_shards_move_no_token_but_keys_and_values():
    sent = shards_of("ring")[0]["sent"]
    assert "tokens of blocks that two ranks share" not in sent
    assert sent["tokens to the ranks of their heads"] == 0
    uneven = shards_of("ring of four, uneven")[1]["sent"]
    assert uneven["tokens of blocks that two ranks share"] > 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("all, ")])
def test_the_model_of_cost_predicts_every_byte(name):
    """Where everything is kept, needs are known. The ranks of a causal ring differ: the model has their mean."""
    case, shards = CASES[name], shards_of(name)
    q, k, _ = case.whole()
    causal, (rows, columns) = bool(case.arguments), case.mesh
    work = Workload(
        q.shape[2], q.shape[1], k.shape[1], 16, element_bytes=4, quantization=case.config.quantization,
        is_causal=causal, return_lse=True, probe_rows=case.config.probe_rows if "probe" in case.config.rule else 0,
    )  # fmt: skip
    predicted = {purpose: count for purpose, count in cost(work, rows, columns).sent.items() if count}
    counted = Counter()
    for shard in shards:
        counted.update({purpose: count for purpose, count in shard["sent"].items() if purpose != "stats"})
    assert {purpose: count / case.ranks for purpose, count in counted.items() if count} == predicted


def test_the_table_of_the_documentation_is_the_models(capsys):
    text = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(blocks[-1])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 7
    assert [row for row in rows if row not in text] == []


def test_the_model_of_cost_counts_the_operations_of_all_ranks_once():
    work = Workload(1 << 14, 32, 8, is_causal=False)
    for mesh in ((1, 1), (4, 1), (1, 8), (4, 8)):
        assert cost(work, *mesh).operations * mesh[0] * mesh[1] == 4 * 32 * (1 << 28) * 128


# ---- hosts


def test_shards_of_torchs_context_parallel_are_zigzag_shards():
    want = CASES["ring causal zigzag"].run_alone()[0]
    for of_rank in results(2):
        torch.testing.assert_close(of_rank["hosts"]["torch"], want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("host", ["patched", "compiled"])
def test_torchs_attention_and_compiled_code_inside_a_block(host):
    want = CASES["ring causal zigzag"].run_alone()[0]
    for of_rank in results(2):
        torch.testing.assert_close(of_rank["hosts"][host], want, atol=2e-5, rtol=0)
        assert of_rank["hosts"]["calls"] == 1


@pytest.mark.parametrize("host", ["patched dense", "transformers dense"])
def test_hosts_do_not_leave_a_shard_dense(host):
    for of_rank in results(2):
        said = of_rank["hosts"][host]
        assert said.startswith("Inside a context_parallel block attention cannot stay dense: ")
        assert said.endswith(".")
        assert of_rank["hosts"]["compiled dense"].startswith("Observed exception")  # how torch.compile reports it


# ---- what must fail

REFUSALS = {
    "heads": ("ValueError", "Ranks 0 and 1", "numbers of query heads", "4 and 6"),
    "batch": ("ValueError", "batch sizes", "1 and 2"),
    "head_dim": ("ValueError", "head_dim", "16 and 32"),
    "dtype": ("ValueError", "Ranks 0 and 1", "dtypes"),
    "config": ("ValueError", "different config"),
    "causal": ("ValueError", "is_causal"),
    "padding": ("ValueError", "key padding"),
    "return_lse": ("ValueError", "return_lse"),
    "sharding": ("ValueError", "sharding"),
    "zigzag lengths": ("ValueError", "[77, 77]", "[64, 90]", "shard_sequence"),
    "segments": ("ValueError", "rank 0", "(10, 50)", "64"),
    "too many ranks": ("ValueError", "1 heads", "2 ranks"),
    "per head": ("ValueError", "gap", "2 values", "4 heads"),
    "ends": ("ValueError", "cu_seqlens_q", "128"),
    "other ends": ("ValueError", "sequence ends"),
    "longest": ("ValueError", "max_seqlen_q=64", "128"),
    "function": ("ValueError", "functions or sequence ends"),
    "own mask": ("RuntimeError", "predict_mask", "shard only"),
    "predict": ("RuntimeError", "predict_mask", "shard only"),
    "mesh": ("TypeError", "DeviceMesh", "str"),
    "mesh names": ("ValueError", "without names"),
    "other names": ("ValueError", "'dp'"),
    "unknown sharding": ("ValueError", "'striped'"),
    "bad segments": ("ValueError", "(3.5,)"),
    "bad timeout": ("ValueError", "-1"),
}


def refusals() -> list[dict[str, str | None]]:
    return [of_rank["refusals"] for of_rank in results(2)]


def call_refused(rank: int) -> dict[str, str | None]:
    """What each call raises; the ranks go through them together, so one that left the others waiting would show."""
    found: dict[str, str | None] = {}
    for name, call in refused_calls().items():
        try:
            call(rank)
            found[name] = None
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("name", REFUSALS)
def test_every_rank_says_what_is_wrong_in_one_sentence(name):
    for said in (answers[name] for answers in refusals()):
        assert said is not None
        kind, _, sentence = said.partition(": ")
        assert kind == REFUSALS[name][0], said
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert len(sentence) < 400
        for word in REFUSALS[name][1:]:
            assert word in sentence, f"{word!r} is not said in: {sentence}"


def test_a_rank_that_refuses_its_inputs_tells_the_others():
    other, own = (answers["float64"] for answers in refusals())
    assert own.startswith("TypeError: query has dtype torch.float64")
    assert other == "RuntimeError: Rank 1 refused its inputs, and all ranks must compute together: see its error."


def test_after_refusals_the_ranks_compute_again():
    assert [answers["nothing"] for answers in refusals()] == [None, None]


PATIENCE = 6.0  # seconds


def die_or_keep_silent(rank: int) -> str:
    """Of the first two ranks one dies while keys and values move; of the other two one never calls."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "ring"))["ring"]
    q, k, v = tensors(1, q_len=256)
    if rank == 1:
        Team.start = lambda *_, **__: os._exit(1)
    if rank == 3:
        time.sleep(120)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught, sparge.context_parallel(mesh, timeout=PATIENCE):
        sparge.attention(q, k, v, config=EXACT)
    assert time.monotonic() - start < 2 * PATIENCE
    return str(caught.value)


def test_a_rank_that_dies_or_keeps_silent_makes_the_others_fail_in_time():
    _, answers = outcome(4)
    assert sorted(answers) == [0, 2]
    assert "Contact" in answers[0]
    assert "keys and values" in answers[0]
    assert "shapes and settings" in answers[2]
    for sentence in answers.values():
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert len(sentence) < 400
