"""The FLOP formula against the products that torch itself counts in a step, and a forecast's sample against a pack."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.draft.flops import step_flops
from common.forecast.arithmetic import sample_flops
from common.training.utilisation import pack_flops
from tests.support.unrolled_case import HIDDEN, Case, config, make_pack

STEPS, VOCAB, DRAFT_VOCAB = 4, 48, 24


def counted(case: Case) -> dict:
    """Operations of a forward and backward by operator, as torch counts them."""
    module = case.module()
    with FlopCounterMode(display=False) as counter:
        module(case.pack).loss.backward()
    return counter.get_flop_counts()["Global"]


@pytest.mark.parametrize("q_lora_rank", [0, 12])
@pytest.mark.parametrize("form", ["llama", "mla"])
@pytest.mark.parametrize(("lengths", "mask"), [([40], "all"), ([30, 50], "suffix"), ([30, 20], "holes")])
def test_products_of_a_step(form, q_lora_rank, lengths, mask):
    c = config(form, VOCAB, DRAFT_VOCAB, **({"q_lora_rank": q_lora_rank} if form == "mla" else {}))
    case = Case(c, make_pack(lengths, VOCAB, 3, mask), steps=STEPS)
    operators, rows = counted(case), len(case.pack.loss_positions.positions)
    products = operators[torch.ops.aten.mm] + operators[torch.ops.aten.addmm]
    in_place = (
        2 * STEPS * rows * c.intermediate_size * HIDDEN
    )  # addmm_, which torch does not count: a gradient of the MLP
    mean_rows = 2 * (rows + STEPS - 1) * DRAFT_VOCAB * HIDDEN  # a shortcut of the loss, not part of the arithmetic
    assert step_flops(c, sum(lengths), rows, 0, STEPS) == products + in_place - mean_rows


def test_attention_of_a_step():
    """The CPU kernel multiplies whole blocks of one document, masked pairs too, and its backward does five products of
    the six that the formula counts for forward and backward; torch counts no flash forward on the CPU."""
    case = Case(c := config(vocab=VOCAB, draft_vocab=DRAFT_VOCAB), make_pack([40], VOCAB, 3, "all"), steps=STEPS)
    rows = len(case.pack.loss_positions.positions)
    attention = step_flops(c, 40, rows, rows * rows, STEPS) - step_flops(c, 40, rows, 0, STEPS)
    assert attention == counted(case)[torch.ops.aten.bmm] / 5 * 6


@pytest.mark.parametrize("form", ["llama", "mla"])
def test_a_forecast_counts_a_sample_as_training_counts_its_pack(form):
    c, pack = config(form, VOCAB, DRAFT_VOCAB), make_pack([101], VOCAB, 1)
    prompt = 101 - int(pack.loss_mask.sum())
    assert 10 < prompt < 91
    wanted = pack_flops(c, pack, 5)
    assert sample_flops(c, prompt, 101 - prompt, 5) == pytest.approx(wanted, rel=0.05)  # the last token has no loss
