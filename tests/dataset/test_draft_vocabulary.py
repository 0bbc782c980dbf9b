"""The draft vocabulary: offsets, ties, what is always kept, and mappings that are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.dataset.draft_vocabulary import byte_tokens, choose_tokens, coverage, coverage_table, kept_tokens, mappings
from common.pipeline.errors import UserError


def counts(**of: int) -> torch.Tensor:
    found = torch.zeros(10, dtype=torch.int64)
    for id, count in of.items():
        found[int(id[1:])] = count
    return found


def test_case_25_kept_0_3_7_of_10():
    kept = choose_tokens(counts(t0=5, t3=9, t7=1), 3, [])
    d2t, t2d = mappings(kept, 10)
    assert d2t.tolist() == [0, 2, 5] and d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool and torch.nonzero(t2d).flatten().tolist() == [0, 3, 7]
    assert kept_tokens(d2t, t2d).tolist() == [0, 3, 7]


def test_control_tokens_are_kept_though_never_written():
    assert choose_tokens(counts(t0=5, t3=9, t7=1), 3, [8, 9]).tolist() == [3, 8, 9]
    assert choose_tokens(counts(t0=5, t3=9, t7=1), 2, [8, 9, 9]).tolist() == [8, 9]


def test_single_bytes_are_found_in_both_spellings(tiny):
    """The byte-level alphabet, where a space is spelled Ġ; and <0xNN> beside single ASCII characters."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    assert byte_tokens(tiny.tokenizer) == list(range(256))  # four merges and the control tokens follow
    words = ["<unk>", "<0x0A>", "<0xE4>", "▁", "a", "ab", "é", "<0x0>", "▁a"]
    model = BPE({word: id for id, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    piece = Tokenizer(model)
    piece.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert byte_tokens(PreTrainedTokenizerFast(tokenizer_object=piece)) == [1, 2, 4]


def test_every_byte_of_kimi_is_kept(kimi):
    found = byte_tokens(kimi.tokenizer)
    assert len(found) == 256
    assert sorted(len(kimi.decode([id]).encode()) for id in found)[:128] == [1] * 128


def test_ties_go_to_the_lowest_id_and_so_does_padding():
    assert choose_tokens(counts(t9=1, t5=1, t2=1, t4=2), 3, []).tolist() == [2, 4, 5]
    assert choose_tokens(counts(t9=3), 4, []).tolist() == [0, 1, 2, 9]
    assert choose_tokens(counts(), 3, [6]).tolist() == [0, 1, 6]


def test_the_choice_never_changes_the_counts():
    written = counts(t1=4, t2=2)
    choose_tokens(written, 3, [8])
    assert written.tolist() == counts(t1=4, t2=2).tolist()


@pytest.mark.parametrize("size", [0, 10])
def test_the_whole_vocabulary(size):
    kept = choose_tokens(counts(t9=1), size, [3])
    d2t, t2d = mappings(kept, 10)
    assert kept.tolist() == list(range(10)) and not d2t.any() and t2d.all()
    assert kept_tokens(d2t, t2d).tolist() == list(range(10))


@pytest.mark.parametrize("size", [-1, 1, 11])
def test_an_impossible_size_is_refused_with_the_limits(size):
    with pytest.raises(UserError, match=r"draft_vocab_size -?\d+ must lie between 2 and 10 \(0: all\)"):
        choose_tokens(counts(), size, [3, 4])


def test_an_absolute_d2t_is_refused():
    kept = torch.tensor([0, 3, 7])
    _, t2d = mappings(kept, 10)
    with pytest.raises(UserError, match="contradict"):
        kept_tokens(kept, t2d)


@pytest.mark.parametrize(("d2t", "ids"), [([0, 2, 5], [0, 3, 8]), ([0, 2], [0, 3, 7]), ([3, -1, 5], [0, 3, 7])])
def test_a_mapping_that_contradicts_itself_is_refused(d2t, ids):
    """Another id, too few, and the right ids in another order: every head row would mean another token."""
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[ids] = True
    with pytest.raises(UserError, match="contradict"):
        kept_tokens(torch.tensor(d2t), t2d)


@given(st.lists(st.integers(0, 5), min_size=12, max_size=12), st.sets(st.integers(0, 11), max_size=3), st.data())
def test_mappings_come_back_and_hold_the_most_frequent(of, always, data):
    written = torch.tensor(of)
    size = data.draw(st.integers(max(1, len(always)), 12))
    kept = choose_tokens(written, size, sorted(always))
    assert kept.tolist() == sorted(set(kept.tolist())) and len(kept) == size and always <= set(kept.tolist())
    assert kept_tokens(*mappings(kept, 12)).tolist() == kept.tolist()
    chosen = [of[id] for id in kept.tolist() if id not in always]
    left = [of[id] for id in range(12) if id not in kept.tolist()]
    assert not chosen or not left or min(chosen) >= max(left)


def test_coverage_is_the_share_of_written_tokens():
    written = counts(t0=6, t3=3, t7=1)
    assert coverage(written, torch.tensor([0, 3])) == pytest.approx(0.9)
    assert coverage(written, torch.tensor([4])) == 0.0
    assert coverage(counts(), torch.tensor([0])) == 0.0
    table = coverage_table(torch.ones(20_000, dtype=torch.int64), [5])
    assert [size for size, _ in table] == [8192, 16384, 20_000]
    assert [share for _, share in table] == pytest.approx([8192 / 20_000, 16384 / 20_000, 1.0])
