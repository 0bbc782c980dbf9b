"""The training set: a split by question, drops that are counted, packs that hold each row once, and the stored rows."""

from array import array
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.dataset.index import HELD_OUT, TRAIN, Index, IndexBuilder, held_out
from common.dataset.packs import Packs, pack_sequences
from common.dataset.shard_layout import ShardKind
from common.dataset.shards import Shard, ShardWriter, States
from common.dataset.stream import Stream
from common.pipeline.settings import Dataset
from common.training.batches import PackOrder, step_packs
from common.training.ranks import Ranks

VOCAB, HIDDEN, LAYERS = 50, 4, (1, 2)
KIND = ShardKind("some/target", "abc", HIDDEN, LAYERS)


def stream(id: str, tokens: int, prompt: int = 2, question: str = "", **facts) -> Stream:
    known = {"question": question or id, "source": "some/set", "finish": "stop", "reasoning": 0}
    ids = array("i", [(ord(id[-1]) + i) % VOCAB for i in range(tokens)])
    return Stream(id, ids, array("B", [i >= prompt for i in range(tokens)]), known | facts)


@pytest.fixture
def index(tmp_path):
    """Writes streams into shards, and returns (builder, index) under these settings."""

    def build(*shards: list[Stream], **values) -> tuple[IndexBuilder, Index]:
        builder = IndexBuilder(Dataset(**{"holdout_share": 0.0, **values}), VOCAB)
        for number, streams in enumerate(shards):
            name = f"shard-{number:05d}.safetensors"
            writer = ShardWriter(tmp_path / name, streams, KIND)
            for at, one in enumerate(streams):
                rows = torch.arange(len(one))[:, None] + 100 * at + 1000 * number
                aux = (rows * 1.0).expand(-1, HIDDEN * len(LAYERS)).bfloat16()
                writer.write(one.id, States(aux, aux[:, :HIDDEN] * 2))
            writer.finish()
            builder.add(name, Shard(tmp_path / name))
        return builder, builder.build()

    return build


# ---- split ----


def test_a_question_is_in_one_split_whatever_comes_with_it(index):
    """Repeats and later turns carry the first turn's question; more data moves no question."""
    questions = [f"q{i}" for i in range(40)]
    rows = [stream(f"{q}-{part}", 6, question=q) for q in questions for part in "ab"]
    _, small = index(rows[:40], holdout_share=0.3)
    _, large = index(rows[:40], rows[40:], holdout_share=0.3)
    split = large.split.tolist()
    assert split[:40] == small.split.tolist() and 0 < sum(split) < 80
    assert split[0::2] == split[1::2]


def test_the_split_follows_its_share():
    some = [f"q{i}" for i in range(2000)]
    shares = {share: sum(held_out(q, Dataset(holdout_share=share)) for q in some) / 2000 for share in (0.0, 0.1, 1.0)}
    assert shares[0.0] == 0 and shares[0.1] == pytest.approx(0.1, abs=0.03) and shares[1.0] == 1
    first, more = ({q for q in some if held_out(q, Dataset(0, share))} for share in (0.1, 0.2))
    assert first <= more  # a larger share keeps what was held out


def test_held_out_tokens_do_not_choose_the_vocabulary(index):
    rows = [stream(f"q{i}", 8) for i in range(60)]
    builder, found = index(rows, holdout_share=0.5)
    train = [rows[i] for i in found.rows(TRAIN)]
    want = torch.zeros(VOCAB, dtype=torch.int64)
    for one in train:
        for id, mask in zip(one.ids, one.mask, strict=True):
            want[id] += mask
    assert found.rows(HELD_OUT) and torch.equal(builder.counts, want)


# ---- filters and cuts ----


def test_samples_without_a_loss_position_are_dropped_and_counted(index):
    """A single token of the target's has no position with a token after the next one."""
    rows = [stream("whole", 20, reasoning=9), stream("single", 3, reasoning=1), stream("cut", 20, finish="length")]
    builder, found = index(rows)
    assert [rows[i].id for i in found.number.tolist()] == ["whole", "cut"]
    assert builder.dropped == {"fewer than 2 tokens written by the target": 1}


def test_long_samples_are_cut_and_judged_by_what_is_left(index):
    """A reply that lies wholly behind the cut would be a row without loss (case 9)."""
    rows = [stream("fits", 16), stream("cut", 40), stream("prompt", 40, prompt=16), stream("one", 40, prompt=15)]
    builder, found = index(rows, sample_tokens=16)
    assert [rows[i].id for i in found.number.tolist()] == ["fits", "cut"]
    assert found.length.tolist() == [16, 16] and found.supervised.tolist() == [14, 14]
    assert sum(builder.dropped.values()) == 2 and int(builder.counts.sum()) == 28


def test_the_index_comes_back(index, tmp_path):
    _, found = index([stream("a", 5), stream("b", 7)], [stream("c", 6)])
    found.save(tmp_path / "index.safetensors")
    again = Index.load(tmp_path / "index.safetensors")
    assert again.shards == ["shard-00000.safetensors", "shard-00001.safetensors"]
    for name in ("shard", "number", "start", "length", "supervised", "split"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert (again.start.tolist(), again.length.tolist()) == ([0, 5, 0], [5, 7, 6])


# ---- packs ----


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=120), st.integers(50, 90), st.none() | st.integers(0, 5))
def test_packs_hold_each_row_once_within_the_budget(lengths, budget, seed):
    rows = list(range(len(lengths)))
    packs = pack_sequences(rows, lengths, budget, seed)
    assert sorted(row for pack in packs for row in pack) == rows
    assert all(0 < sum(lengths[row] for row in pack) <= budget for pack in packs)
    assert packs == pack_sequences(rows, lengths, budget, seed)
    halves = sum(2 * sum(lengths[row] for row in pack) > budget for pack in packs)
    assert len(packs) <= halves + 1  # first fit leaves at most one pack half empty


def test_seeds_shuffle_rows_and_packs():
    lengths = [10 + i % 7 for i in range(400)]
    plans = [pack_sequences(list(range(400)), lengths, 64, seed) for seed in (0, 1)]
    assert plans[0] != plans[1] and plans[0][0] != plans[1][0]
    sizes = [sum(lengths[row] for row in pack) for pack in plans[0]]
    assert sum(sizes) / (64 * len(sizes)) > 0.9


def test_only_the_named_rows_are_packed():
    assert sorted(chain(*pack_sequences([3, 5], [9] * 8, 9, 1))) == [3, 5]
    assert pack_sequences([], [1, 2], 9, 1) == []


def test_a_pack_is_exactly_the_stored_rows(index, tmp_path):
    shards = [[stream("a", 5), stream("b", 20)], [stream("c", 6, prompt=3)]]
    _, found = index(*shards, sample_tokens=12)
    pack = Packs(tmp_path, found, 12).load([2, 1])
    assert pack.ids == ["c", "b"] and pack.offsets.tolist() == [0, 6, 18]
    assert pack.input_ids.tolist() == [*shards[1][0].ids, *shards[0][1].ids[:12]]
    assert pack.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 10
    assert pack.input_ids.dtype == torch.int64 and pack.loss_mask.dtype == torch.bool
    stored = [Shard(tmp_path / name).sequence(i)[2] for name, i in ((found.shards[1], 0), (found.shards[0], 1))]
    assert torch.equal(pack.aux_hidden, torch.cat([stored[0].aux, stored[1].aux[:12]]))
    assert torch.equal(pack.last_hidden, torch.cat([stored[0].last, stored[1].last[:12]]))


def test_pairs_are_the_written_tokens_with_the_one_before(index, tmp_path):
    _, found = index([stream("a", 5), stream("b", 20)], sample_tokens=12)
    pairs = [(p.tolist(), w.tolist()) for p, w in Packs(tmp_path, found, 12).token_pairs(TRAIN)]
    ids = [list(stream(id, 12).ids) for id in "ab"]  # a is 5 tokens long, b is cut to 12, each with a prompt of 2
    assert pairs == [(ids[0][1:4], ids[0][2:5]), (ids[1][1:11], ids[1][2:12])]


# ---- the order of an epoch, over ranks and resumes ----


@pytest.fixture
def order(index, tmp_path):
    _, found = index([stream(f"q{i}", 4 + i % 9) for i in range(50)], sample_tokens=16)
    return lambda seed=0: PackOrder(Packs(tmp_path, found, 16), seed)


def test_every_epoch_holds_each_row_once_in_another_order(order):
    packs = order()
    one, two = packs.count(1), packs.count(2)
    epochs = [[packs.at(i)[1] for i in span] for span in (range(one), range(one, two))]
    for epoch in epochs:
        assert sorted(chain(*epoch)) == list(range(50))
    assert epochs[0] != epochs[1]
    assert one < packs.count(1.5) < two
    assert packs.at(0)[0] == 0.0 and packs.at(one)[0] == 1.0


def test_the_order_is_a_number_wherever_one_starts(order):
    """Asked from the middle, backwards, or by another process: the same packs."""
    first, total = order(), order().count(3)
    whole = [first.at(i) for i in range(total)]
    for start in (0, 7, first.count(1) - 1, first.count(1), total - 1):
        resumed = order()
        assert [resumed.at(i) for i in range(start, total)] == whole[start:]
    assert [first.at(i) for i in reversed(range(total))] == whole[::-1]
    assert [order(1).at(i) for i in range(5)] != whole[:5]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_a_step_without_gap_or_overlap(order, world):
    from common.pipeline.settings import Train

    for step in range(6):
        shares = [
            step_packs(order(), step, Train(packs_per_step=4), Ranks(rank, world, "cpu")) for rank in range(world)
        ]
        assert sorted(chain(*shares)) == sorted(order().at(i)[1] for i in range(4 * step, 4 * step + 4))
