"""How far apart two sets of hidden states are, as relative distances."""

import torch
from torch import Tensor

from tests.end_to_end.pipeline_run import Run


def token_distances(actual: Tensor, wanted: Tensor) -> Tensor:
    """The relative distance of each token's states [T - 1]. The first token is left out: in some models its state is
    so large that it would hide all others."""
    actual, wanted = actual[1:].float(), wanted[1:].float()
    return (actual - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def distance(actual: Tensor, wanted: Tensor, share: float | None = None) -> float:
    """Relative distance over all tokens but the first.

    With `share`, the distance that this share of the tokens does not exceed, each token by itself. In a mixture of
    experts rounding decides where two experts are nearly tied, so that single tokens differ widely between two correct
    engines.
    """
    if share is not None:
        return float(token_distances(actual, wanted).quantile(share))
    actual, wanted = actual[1:].float(), wanted[1:].float()
    return float((actual - wanted).norm() / wanted.norm())


def run_distance(one: Run, other: Run, share: float | None = None) -> tuple[float, int]:
    """(distance of two runs' states, sequences compared): that of the worst sequence, or with `share` the distance that
    this share of all tokens does not exceed. Infinite where the runs do not hold the same samples with the same ids.
    """
    theirs = {id: (ids, aux, last) for id, ids, aux, last in other.sequences()}
    worst, tokens, compared = 0.0, [], 0
    for id, ids, aux, last in one.sequences():
        if id not in theirs or not torch.equal(ids, theirs[id][0]):
            return float("inf"), compared
        for mine, yours in ((aux, theirs[id][1]), (last, theirs[id][2])):
            worst = max(worst, distance(mine, yours))
            tokens.append(token_distances(mine, yours))
        compared += 1
    off = worst if share is None else float(torch.cat(tokens).quantile(share))
    return (off, compared) if compared == len(theirs) else (float("inf"), compared)
