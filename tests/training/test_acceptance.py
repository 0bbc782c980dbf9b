"""Acceptance against a brute-force engine that drafts, verifies and goes on, and a bigram table against a count."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.training.acceptance import REPLY_BORDERS, Bigram, ReplySteps, accepted_rows, measure


def engine(text: list[int], prompt: int, guesses: list[list[int]], k: int) -> tuple[list[int], list[int], set[int]]:
    """(accepted by draft position, tokens a forward, places of accepted tokens) of an engine that serves `text`.

    guesses[s][j]: what the draft says for text[j] as its s-th token, given that all before j is right.
    Every forward of the target yields the accepted tokens and one of its own.
    """
    done, by_position, yields, places = prompt, [0] * k, [], set()
    done += 1  # the prefill writes the first token
    while done < len(text):
        a = 0
        while a < k and done + a < len(text) and guesses[a][done + a] == text[done + a]:
            by_position[a] += 1
            places.add(done + a)
            a += 1
        yields.append(a + 1)
        done += a + 1
    return by_position, yields, places


@st.composite
def replies(draw):
    """(text, length of the prompt, guesses [K][T]) with guesses that are right about two times in three."""
    prompt = draw(st.integers(1, 3))
    text = draw(st.lists(st.integers(0, 3), min_size=prompt + 2, max_size=prompt + 25))
    steps = draw(st.integers(1, 4))
    right = st.lists(st.integers(0, 2), min_size=len(text), max_size=len(text))
    guesses = [
        [t if hit else 9 for t, hit in zip(text, draw(right), strict=True)]  # 9 is never right
        for _ in range(steps)
    ]
    return text, prompt, guesses


def reply_steps(text, prompt, guesses) -> ReplySteps:
    """What training sees: row r is position prompt-1+r, and its step s stands for text[prompt+1+r+s]."""
    rows = len(text) - prompt - 1
    right = torch.zeros(len(guesses), rows, dtype=torch.bool)
    for s in range(len(guesses)):
        for r in range(rows):
            at = prompt + 1 + r + s
            right[s, r] = at < len(text) and guesses[s][at] == text[at]
    return ReplySteps(right)


@settings(max_examples=150, deadline=None)
@given(st.lists(replies(), min_size=1, max_size=3))
def test_the_walk_is_what_an_engine_does(sample):
    steps = min(len(guesses) for _, _, guesses in sample)
    facts = measure([reply_steps(*one) for one in sample])
    assert set(facts["walk"]) == set(range(1, steps + 1))
    for k in range(1, steps + 1):
        runs = [engine(*one, k) for one in sample]
        yields = [y for _, found, _ in runs for y in found]
        walk = facts["walk"][k]
        assert walk["drafts"] == len(yields)
        assert walk["accepted"] == [sum(found[i] for found, _, _ in runs) for i in range(k)]
        assert walk["length"] == pytest.approx(sum(yields) / len(yields))
        for one, (_, _, places) in zip(sample, runs, strict=True):
            marked = accepted_rows(reply_steps(*one).right, k)
            assert {one[1] + 1 + row for row, hit in enumerate(marked) if hit} == places


@settings(max_examples=60, deadline=None)
@given(replies())
def test_per_position_asks_every_row_jointly(sample):
    right = reply_steps(*sample).right.tolist()
    steps, rows = len(right), len(right[0])
    facts = measure([reply_steps(*sample)])
    for k in range(1, steps + 1):
        runs = [next((s for s in range(k) if not right[s][r]), k) for r in range(rows)]
        assert facts["per_position"][k] == pytest.approx(1 + sum(runs) / rows)
    assert facts["step_accuracy"] == pytest.approx([sum(of_step) / rows for of_step in right], abs=1e-5)


def test_the_two_figures_differ():
    """Starts follow accepted runs: the row behind a long run is never asked."""
    right = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0]], dtype=torch.bool)
    facts = measure([ReplySteps(right)])
    assert facts["walk"][2] == {"length": 2.0, "drafts": 2, "accepted": [1, 1]}
    assert facts["per_position"][2] == 2.0
    facts = measure([ReplySteps(torch.tensor([[0, 1, 1, 1]], dtype=torch.bool))])
    assert facts["walk"][1]["length"] == pytest.approx(5 / 3) and facts["per_position"][1] == 1.75


def test_parts_and_places():
    """A draft that is right in reasoning (rows up to the closing one) and wrong behind it."""
    right = torch.zeros(3, 40, dtype=torch.bool)
    right[:, :20] = True
    facts = measure([ReplySteps(right, closing=19)])
    assert facts["by_part"] == {"reasoning": {3: 4.0}, "content": {3: 1.0}}
    assert [(place["from"], place["to"]) for place in facts["by_place"]] == [(0, 32), (32, 64)]
    assert [place["starts"] for place in facts["by_place"]] == [5 + 12, 8]
    assert sum(place["starts"] for place in facts["by_place"]) == facts["walk"][3]["drafts"]
    assert REPLY_BORDERS[0] == 0


def test_a_reply_beyond_the_last_border_is_counted():
    facts = measure([ReplySteps(torch.zeros(1, REPLY_BORDERS[-1] + 3, dtype=torch.bool))])
    assert facts["by_place"][-1] == {"from": REPLY_BORDERS[-1], "to": None, "length": 1.0, "starts": 3}


def test_nothing_held_out_gives_no_figures():
    assert measure([])["walk"] == {} and measure([])["step_accuracy"] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=12), min_size=1, max_size=4), st.data())
def test_bigram_against_a_naive_count(texts, data):
    pairs = [(torch.tensor(text[:-1]), torch.tensor(text[1:])) for text in texts]
    bigram = Bigram(5, iter(pairs))
    counted = Counter(pair for text in texts for pair in pairwise(text))
    for token in range(5):
        followers = {b: n for (a, b), n in counted.items() if a == token}
        best = int(bigram.best[token])
        assert best == -1 if not followers else followers[best] == max(followers.values())
    ids = data.draw(st.lists(st.integers(0, 4), min_size=4, max_size=12))
    steps = data.draw(st.integers(1, 15))
    right = bigram.steps(torch.tensor(ids), steps)
    assert right.shape == (steps, len(ids))
    for s in range(steps):
        for i in range(len(ids)):
            want = i + 2 + s < len(ids) and int(bigram.best[ids[i + 1 + s]]) == ids[i + 2 + s]
            assert bool(right[s, i]) == want
