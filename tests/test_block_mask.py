import warnings

import pytest
import torch
from allocations import LargestTensor
from hypothesis import given
from hypothesis import strategies as st
from problems import plain_attention, refused, tensors, token_mask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sparge
from sparge import BlockMask
from sparge.visibility import UNBOUNDED, Visibility

blocks = st.tuples(st.sampled_from((64, 128, 192, 256)), st.sampled_from((32, 64, 128)))


@st.composite
def dense_masks(draw, block=None):
    """(booleans [B, H, query blocks, key blocks], q_len, k_len, block), ragged tails and many words included."""
    rows, keys = block or draw(blocks)
    q_blocks, k_blocks = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2, 31, 32, 33, 63, 64, 65, 100)))
    q_len = draw(st.integers((q_blocks - 1) * rows + 1, q_blocks * rows))
    k_len = draw(st.integers((k_blocks - 1) * keys + 1, k_blocks * keys))
    seed, density = draw(st.integers(0, 999)), draw(st.sampled_from((0.0, 0.1, 0.5, 1.0)))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), q_blocks, k_blocks)
    dense = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    return dense, q_len, k_len, (rows, keys)


# ---- parts


@given(dense_masks(), st.data())
def test_the_mask_of_some_keys(case, data):
    dense, q_len, k_len, block = case
    first = data.draw(st.integers(0, dense.shape[-1] - 1))
    last = data.draw(st.integers(first + 1, dense.shape[-1]))
    sight = Visibility(q_len, min(last * block[1], k_len) - first * block[1], torch.device("cpu"))
    part = BlockMask.from_dense(dense, q_len, k_len, block).of_keys(first, last, sight)
    assert torch.equal(part.to_dense(), dense[..., first:last])
    assert (part.q_len, part.k_len, part.block) == (q_len, sight.k_len, block)
    assert part.equals(BlockMask.from_dense(dense[..., first:last], q_len, sight.k_len, block))  # no bit beyond


@given(dense_masks())
def test_kept_columns(case):
    dense, q_len, k_len, block = case
    assert torch.equal(BlockMask.from_dense(dense, q_len, k_len, block).kept_columns, dense.flatten(0, 2).any(0))


# ---- forms


@given(dense_masks())
def test_bits_and_back(case):
    dense, q_len, k_len, block = case
    mask = BlockMask.from_dense(dense, q_len, k_len, block)
    assert mask.bits.dtype == torch.int32
    assert mask.bits.shape[-1] == -(-dense.shape[-1] // 32)
    assert (mask.q_blocks, mask.k_blocks) == tuple(dense.shape[2:])
    assert torch.equal(mask.to_dense(), dense)


@given(dense_masks())
def test_block_j_is_bit_j_mod_32_of_word_j_div_32(case):
    dense, q_len, k_len, block = case
    bits = BlockMask.from_dense(dense, q_len, k_len, block).bits
    words = [int(word) & 0xFFFFFFFF for word in bits[0, 0, 0]]
    assert [bool(words[j // 32] >> j % 32 & 1) for j in range(dense.shape[-1])] == dense[0, 0, 0].tolist()


@given(dense_masks())
def test_lists_and_back(case):
    dense, q_len, k_len, block = case
    counts, indices = BlockMask.from_dense(dense, q_len, k_len, block).to_lists()
    assert counts.dtype == indices.dtype == torch.int32
    for place in torch.cartesian_prod(*(torch.arange(n) for n in dense.shape[:3])).tolist():
        b, h, i = place
        kept = dense[b, h, i].nonzero()[:, 0].tolist()
        assert indices[b, h, i].tolist() == kept + [-1] * (dense.shape[-1] - len(kept))
        assert counts[b, h, i] == len(kept)
    assert torch.equal(BlockMask.from_lists(counts, indices, q_len, k_len, block).to_dense(), dense)


def test_lists_may_be_unsorted_repeated_and_hold_anything_past_the_count():
    counts, indices = torch.tensor([[[3, 0]]]), torch.tensor([[[[4, 1, 4, 99, -7], [88, -2, 0, 0, 0]]]])
    mask = BlockMask.from_lists(counts, indices, 256, 320)
    assert mask.to_dense()[0, 0].int().tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_dense_may_leave_out_batch_and_heads():
    dense = torch.eye(2, 4).bool()
    for leading in ((), (1,), (1, 1)):
        assert torch.equal(BlockMask.from_dense(dense.expand(*leading, 2, 4), 256, 256).to_dense()[0, 0], dense)
    assert BlockMask.from_dense(dense.expand(3, 2, 4), 256, 256).bits.shape[:2] == (1, 3)


# ---- measures


@given(dense_masks(), st.integers(0, 99))
def test_sparsity_counts_among_the_visible(case, seed):
    dense, q_len, k_len, block = case
    mask = BlockMask.from_dense(dense, q_len, k_len, block)
    total = dense[0, 0].numel()
    assert mask.kept_per_head.tolist() == dense.sum((2, 3)).tolist()
    assert mask.visible_per_head.tolist() == [[total] * dense.shape[1]] * dense.shape[0]
    assert mask.sparsity.item() == pytest.approx(1 - dense.float().mean().item(), abs=1e-6)
    assert mask.sparsity.dtype == torch.float32
    assert mask.sparsity.dim() == 0

    visible = torch.rand(dense.shape[2:], generator=torch.Generator().manual_seed(seed)) < 0.6
    mask = BlockMask.from_dense(dense, q_len, k_len, block, visible)
    kept = (dense & visible).sum().item()
    possible = visible.sum().item() * dense.shape[0] * dense.shape[1]
    assert mask.visible_per_head.sum().item() == possible
    if possible:
        assert mask.sparsity.item() == pytest.approx(1 - kept / possible, abs=1e-6)


def test_sparsity_with_nothing_visible_is_a_number():
    nothing = torch.zeros(2, 4).bool()
    assert torch.isfinite(BlockMask.from_dense(nothing, 256, 256, visible=nothing).sparsity)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("left", "right"), [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (300, 70)])
def test_counts_and_cuts_are_those_of_the_dense_mask(left, right, padded):
    valid = torch.rand(2, 900, generator=torch.Generator().manual_seed(0)) < 0.01 if padded else None
    sight = Visibility(700, 900, torch.device("cpu"), left, right, valid)
    seen = sight.blocks(128, 64)
    dense = torch.rand(2, 3, *seen.shape[2:], generator=torch.Generator().manual_seed(1)) < 0.5
    mask = BlockMask.from_dense(dense, 700, 900, visible=sight)
    assert torch.equal(mask.kept_per_row, dense.sum(-1))
    assert torch.equal(mask.kept_per_head, (dense & seen).sum((2, 3)))
    assert torch.equal(mask.visible_per_head, seen.sum((2, 3)).expand(2, 3))
    assert torch.equal(mask.cut_to(sight, 2).to_dense(), dense & seen)
    assert torch.equal(BlockMask.all_visible(sight, (128, 64), 2, 3).to_dense(), seen.expand(2, 3, -1, -1))


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_is_larger_than_the_mask(padded):
    """128K tokens in 8 heads: 2 MB of words. A byte for each block would be 17 MB, a number for each 67 MB or more."""
    tokens, heads = 1 << 17, 8
    valid = torch.arange(tokens)[None] < tokens - 1000 if padded else None
    sight = Visibility(tokens, tokens, torch.device("cpu"), right=0, key_valid=valid)
    words = torch.randint(-(2**31), 2**31, (1, heads, 1024, 64), generator=torch.Generator().manual_seed(0))
    mask = BlockMask(words.int(), tokens, tokens, (128, 64), sight)
    with LargestTensor() as seen:
        cut = mask.cut_to(sight, 1)
        measures = (cut.sparsity, cut.kept_per_head, cut.visible_per_head, cut.kept_per_row, mask.sparsity)
        everything = BlockMask.all_visible(sight, (128, 64), 1, heads)
        nothing_skipped = everything.sparsity
    assert seen.bytes <= mask.bits.untyped_storage().nbytes() == 1 << 21
    assert torch.equal(measures[1], cut.to_dense().sum((2, 3)))
    assert torch.equal(measures[2], sight.blocks(128, 64).sum((2, 3)).expand(1, heads))
    assert torch.equal(measures[3], cut.to_dense().sum(-1))
    assert measures[0] == measures[4] > 0
    assert nothing_skipped == 0


def test_a_million_tokens_are_counted_in_a_few_megabytes():
    """A byte for each block of the head would be 134 MB."""
    tokens = 1 << 20
    sight = Visibility(tokens, tokens, torch.device("cpu"), right=0)
    with LargestTensor() as seen:
        mask = BlockMask.all_visible(sight, (128, 64), 1, 1)
        kept, visible = mask.kept_per_head, mask.visible_per_head
    assert kept.item() == visible.item() == sum(2 * (n + 1) for n in range(8192))
    assert seen.bytes <= 8192 * 16384 // 8  # the mask


# ---- sets


@given(dense_masks(), st.integers(0, 99))
def test_union_and_intersection(case, seed):
    dense, q_len, k_len, block = case
    other = torch.rand(dense.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    a, b = (BlockMask.from_dense(x, q_len, k_len, block) for x in (dense, other))
    assert torch.equal((a | b).to_dense(), dense | other)
    assert torch.equal((a & b).to_dense(), dense & other)
    assert (a | b).equals(b | a)
    assert (a & a).equals(a)
    assert a.equals(b) == torch.equal(dense, other)


def test_union_keeps_what_both_know_of_visibility():
    visible = torch.ones(2, 4).bool().tril(1)
    a = BlockMask.from_dense(torch.eye(2, 4).bool(), 256, 256, visible=visible)
    b = BlockMask.from_dense(torch.ones(2, 4).bool() & visible, 256, 256, visible=visible)
    assert (a | b).sparsity == 0
    assert (a & b).sparsity == pytest.approx(1 - 2 / 5)


def test_one_head_combines_with_many():
    one = BlockMask.from_dense(torch.eye(2, 4).bool(), 256, 256)
    many = BlockMask.from_dense(torch.zeros(2, 3, 2, 4).bool(), 256, 256)
    assert (one | many).bits.shape[:2] == (2, 3)
    assert (one | many).kept_per_head.tolist() == [[2, 2, 2]] * 2


@pytest.mark.parametrize(
    "other",
    [
        BlockMask.from_dense(torch.ones(2, 4).bool(), 255, 256),
        BlockMask.from_dense(torch.ones(3, 4).bool(), 384, 256),
        BlockMask.from_dense(torch.ones(2, 40).bool(), 256, 2560),
        BlockMask.from_dense(torch.ones(4, 4).bool(), 256, 256, (64, 64)),
    ],
    ids=["q_len", "more query blocks", "more words", "block"],
)
@pytest.mark.parametrize("combine", [BlockMask.__or__, BlockMask.__and__], ids=["or", "and"])
def test_masks_of_different_shape_do_not_combine(other, combine):
    mask = BlockMask.from_dense(torch.ones(2, 4).bool(), 256, 256)
    assert not mask.equals(other)
    with refused(ValueError, "different", repr(mask), repr(other)):
        combine(mask, other)


# ---- pictures


def test_picture_shows_kept_skipped_and_invisible():
    kept = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]]).bool()
    visible = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    assert BlockMask.from_dense(kept, 256, 256, visible=visible).picture() == "█·\n·███"
    assert BlockMask.from_dense(kept, 256, 256).picture() == "█···\n·███"


def test_picture_of_one_head():
    dense = torch.zeros(2, 2, 1, 2).bool()
    dense[1, 1] = True
    visible = torch.ones(1, 1, 1, 2).bool()
    mask = BlockMask.from_dense(dense, 128, 128, visible=visible)
    assert mask.picture() == "··"
    assert mask.picture(batch=1, head=1) == "██"


def test_wide_pictures_are_pooled():
    dense = torch.zeros(100, 200).bool()
    dense[:, :100] = True
    dense[:, 100::10] = True
    lines = BlockMask.from_dense(dense, 12800, 12800).picture(width=20).splitlines()
    assert len(lines) == 10
    assert set(lines) == {"█" * 10 + "░" * 10}


def test_repr_says_shape_and_sparsity():
    mask = BlockMask.from_dense(torch.eye(2, 4).bool().expand(3, 5, 2, 4), 200, 256)
    assert repr(mask) == "BlockMask(batch=3, heads=5, 2 x 4 blocks of 128 x 64, sparsity 75.0%)"


# ---- FlexAttention


def eager_flex(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends torch.compile
        return flex_attention(*args, **kwargs)


@given(dense_masks(block=(128, 128)), st.booleans())
def test_to_flex_and_back(case, with_mask_mod):
    dense, q_len, k_len, block = case
    mask = BlockMask.from_dense(dense, q_len, k_len, block)
    flex = mask.to_flex((lambda b, h, q, k: q >= k) if with_mask_mod else None)
    assert flex.seq_lengths == (q_len, k_len)
    assert tuple(flex.BLOCK_SIZE) == block
    assert torch.equal(flex.to_dense().bool(), dense)
    assert BlockMask.from_flex(flex).equals(mask)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (128, 64)])
@pytest.mark.parametrize(("q_len", "k_len"), [(256, 256), (200, 330), (1, 65)])
def test_from_flex_joins_partial_and_full_blocks(block, q_len, k_len):
    flex = create_block_mask(lambda b, h, q, k: q >= k, 1, 2, q_len, k_len, device="cpu", BLOCK_SIZE=block)
    mask = BlockMask.from_flex(flex)
    rows, keys = block
    want = [[j * keys <= min((i + 1) * rows, q_len) - 1 for j in range(mask.k_blocks)] for i in range(mask.q_blocks)]
    assert mask.to_dense().tolist() == [[want] * 2]
    assert (mask.q_len, mask.k_len, mask.block) == (q_len, k_len, block)


def test_from_flex_refuses_its_unsupported_block_sizes():
    flex = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=(512, 512))
    with refused(ValueError, "block", "(512, 512)"):
        BlockMask.from_flex(flex)


def test_flex_attention_computes_what_we_compute():
    q, k, v = tensors(q_len=200, k_len=256)
    kept = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]]).bool()
    mask = BlockMask.from_dense(kept, 200, 256)
    flex = mask.to_flex(lambda b, h, i, j: kept[i // 128, j // 64])
    ours = sparge.block_sparse_attention(q, k, v, mask)
    torch.testing.assert_close(ours, eager_flex(q, k, v, block_mask=flex), atol=1e-5, rtol=0)


def test_flex_attention_over_a_converted_mask_leaves_out_the_skipped_blocks():
    """Run without a compiler, flex_attention reads the mask_mod alone: it has to say what the blocks say."""
    q, k, v = tensors(q_len=200, k_len=256)
    mask = BlockMask.from_dense(torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]]).bool(), 200, 256)
    want, _ = plain_attention(q, k, v, token_mask(mask))
    torch.testing.assert_close(eager_flex(q, k, v, block_mask=mask.to_flex()).double(), want, atol=1e-5, rtol=0)


# ---- bad input


@pytest.mark.parametrize("block", [(100, 64), (128, 16), (512, 64), (0, 64), (128, 0), (128,), 128], ids=str)
def test_refuses_unsupported_block_sizes(block):
    fitting = {(100, 64): (3, 4), (128, 16): (2, 16), (512, 64): (1, 4)}.get(block, (2, 4))
    with refused(ValueError, "block", repr(block)):
        BlockMask.from_dense(torch.ones(fitting).bool(), 256, 256, block)
    with refused(ValueError, "block", repr(block)):
        BlockMask(torch.zeros(1, 1, 2, 1, dtype=torch.int32), 256, 256, block)


@pytest.mark.parametrize(
    "dense",
    [torch.ones(2, 4), torch.ones(2, 4).int(), torch.ones(2, 5).bool(), torch.ones(3, 4).bool(), torch.ones(4).bool()],
    ids=["float", "int", "keys", "rows", "rank"],
)
def test_refuses_dense_masks_that_do_not_fit(dense):
    with refused(ValueError, "dense", "[2, 4]", str(dense.dtype), str(tuple(dense.shape))):
        BlockMask.from_dense(dense, 256, 256)
    with refused(ValueError, "visible", "[2, 4]", str(dense.dtype), str(tuple(dense.shape))):
        BlockMask.from_dense(torch.ones(2, 4).bool(), 256, 256, visible=dense)


@pytest.mark.parametrize(
    "bits",
    [torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 2).int(), torch.zeros(1, 2, 1).int(), torch.zeros(1, 1, 1, 1).int()],
    ids=["float", "words", "rank", "rows"],
)
def test_refuses_bits_that_do_not_fit(bits):
    with refused(ValueError, "bits", "int32 [B, H, 2, 1]", str(bits.dtype), str(tuple(bits.shape))):
        BlockMask(bits, 256, 256, (128, 64))


@pytest.mark.parametrize("wrong", [4, 99, -1])
def test_refuses_lists_that_name_missing_blocks(wrong):
    with refused(ValueError, "indices", "0 to 3"):
        BlockMask.from_lists(torch.tensor([[[2, 1]]]), torch.tensor([[[[0, wrong], [0, 0]]]]), 256, 256)


def test_refuses_counts_beyond_the_lists():
    with refused(ValueError, "counts", "3", "2"):
        BlockMask.from_lists(torch.tensor([[[3, 1]]]), torch.tensor([[[[0, 1], [0, 0]]]]), 256, 256)
