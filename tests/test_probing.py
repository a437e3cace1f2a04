import pytest
import torch

from sparge import SparseConfig, reference
from sparge.inputs import prepare_inputs
from sparge.probing import best_of_groups, probe_positions


def test_a_group_is_what_one_thread_holds_of_64_keys():
    best = best_of_groups(torch.arange(128.0), 64)
    assert best.tolist() == [[57, 59, 61, 63], [121, 123, 125, 127]]
    lone = torch.full((64,), -torch.inf)
    for key, group in ((0, 0), (9, 0), (2, 1), (12, 2), (63, 3)):
        scores = lone.clone()
        scores[key] = 1.0
        assert best_of_groups(scores, 64)[0].tolist() == [1.0 if n == group else -torch.inf for n in range(4)]


@pytest.mark.parametrize(("block", "groups"), [(32, 4), (64, 4), (128, 8)])
def test_every_block_has_its_groups_and_the_last_may_be_short(block, groups):
    best = best_of_groups(torch.zeros(2, 3, 200), block)
    assert best.shape == (2, 3, -(-200 // block), groups)
    alone = best_of_groups(torch.zeros(2, 3, block + 1), block)[..., 1, :]  # one key, in the first group
    assert alone[..., 0].eq(0).all()
    assert alone[..., 1:].eq(-torch.inf).all()


def test_numbers_that_are_none_are_passed_over():
    scores = torch.zeros(64)
    scores[:9] = torch.nan
    assert best_of_groups(scores, 64).tolist() == [[0.0] * 4]
    assert best_of_groups(torch.full((64,), torch.nan), 64).eq(-torch.inf).all()


def shares_by_hand(scores: torch.Tensor, config: SparseConfig) -> torch.Tensor:
    """Block by block: the best of each group, divided by the sum over all groups."""
    weights = torch.stack([x.unflatten(-1, (8, 4, 2)).amax((-3, -1)).exp().sum(-1) for x in scores.split(64, -1)], -1)
    share = weights / weights.sum(-1, keepdim=True)
    return share.unflatten(2, (-1, config.probe_rows)).mean(3)


@pytest.mark.parametrize("quantization", ["none", "int8", "int8-fp8"])
def test_scores_are_those_that_attention_will_have(quantization):
    torch.manual_seed(0)
    config = SparseConfig(rule="probe", quantization=quantization)
    q, k, v = torch.randn(3, 1, 4, 512, 64).unbind()
    inputs = prepare_inputs(q, k[:, :2], v[:, :2], enable_gqa=True)
    blocks = reference.summarize(inputs, config)
    rows = probe_positions(512, 128, config.probe_rows, q.device).flatten()
    if blocks.quantized is None:
        query, key = q.bfloat16().float(), k[:, :2].bfloat16().float()
    else:
        copies = blocks.quantized
        query = copies.query.float() * copies.query_scale[..., None]
        key = copies.key.float() * copies.key_scale.repeat_interleave(64, 2)[..., None]
    scores = query[:, :, rows] @ key.repeat_interleave(2, 1).mT * inputs.scale
    want = shares_by_hand(scores, config)
    torch.testing.assert_close(reference.probe(blocks, config)[:, :, 1:].float(), want, atol=2e-4, rtol=2e-3)
