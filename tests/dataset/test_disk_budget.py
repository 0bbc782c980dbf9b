"""The arithmetic of a disk budget: sizes, rounds, and the order of packs that is known before any state is there."""

import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.dataset.disk_budget import assign_rounds, parse_size
from common.pipeline.errors import UserError
from common.pipeline.settings import Train
from common.training.disk_budget import FollowedPacks, RoundOrder


def test_sizes():
    sizes = {"500GB": 500 * 10**9, "400GiB": 400 * 2**30, "1.5 TB": 15 * 10**11, "2tib": 2 * 2**40, "7B": 7, "": 0}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("500", "GB", "-1GB", "5 G", "0GB", "1e3GB"):
        with pytest.raises(UserError):
            parse_size(text)


@given(st.lists(st.integers(1, 40) | st.integers(10**7, 10**10)), st.integers(2, 200))
def test_rounds_fill_half_the_budget_in_order(sizes, window):
    if max(sizes, default=0) > window // 2:
        with pytest.raises(UserError, match=r"half the disk budget must hold a shard") as refused:
            assign_rounds(sizes, window)
        advised = re.search(r"at least ([\d.]+ .B)", str(refused.value))[1]
        assert len(assign_rounds(sizes, parse_size(advised))) == len(sizes)  # what is advised is enough
        return
    rounds = assign_rounds(sizes, window)
    filled = [sum(s for s, r in zip(sizes, rounds, strict=True) if r == number) for number in range(len(set(rounds)))]
    assert rounds == sorted(rounds) and set(rounds) == set(range(len(filled)))
    assert all(total <= window // 2 for total in filled)
    for number in range(1, len(filled)):  # no shard that the round before had room for
        assert filled[number - 1] + sizes[rounds.index(number)] > window // 2


@given(st.lists(st.lists(st.integers(2, 30), max_size=12), min_size=1, max_size=6), st.sampled_from([0.5, 1, 1.5, 3]),
       st.integers(1, 4))  # fmt: skip
def test_the_order_of_packs(lengths, epochs, each):
    """Every sample as often as asked, round by round; a step and the next need two rounds at most, or are refused."""
    flat = [(number, length) for number, of in enumerate(lengths) for length in of]
    packs = FollowedPacks.__new__(FollowedPacks)
    packs.lengths, packs.pack_tokens = [length for _, length in flat], 32
    packs.rounds = [[row for row, (of, _) in enumerate(flat) if of == number] for number in range(len(lengths))]
    try:
        order = RoundOrder(packs, Train(epochs=epochs, packs_per_step=each))
    except UserError:
        return
    total = order.count(epochs)
    steps = total // each
    seen = [order.at(i)[1] for i in range(total)]
    numbers = [[flat[row][0] for row in pack] for pack in seen]
    assert all(len(set(pack)) == 1 for pack in numbers)
    of_pack = [pack[0] for pack in numbers]
    assert of_pack == sorted(of_pack)
    times = Counter(row for pack in seen for row in pack)
    assert all(math.floor(epochs) <= times[row] <= math.ceil(epochs) for row in range(len(flat)))
    for step in range(steps):
        packs_needed = of_pack[step * each : min(step + 2, steps) * each]
        assert packs_needed[-1] - order.rounds_done(step) <= 1  # the rounds that are not deleted when they are read
        assert all(number >= order.rounds_done(step) for number in packs_needed)
    assert order.rounds_done(steps) == len(lengths)
