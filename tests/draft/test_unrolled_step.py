"""The fast unrolled step against the slow definition in tests/support/reference.py: values and gradients."""

import math
from dataclasses import replace

import pytest
import torch

from common.dataset.packs import Pack
from common.draft.kernels import compile_loops
from tests.support.unrolled_case import Case, config, make_pack

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "mscale": 1.0}
YARN |= {"mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed):
    """Lengths, packings, masks, vocabularies, step counts, forms and options drawn together."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(0, len(values), (), generator=draw))]

    form = ("llama", "mla")[seed % 2]
    lengths = [int(n) for n in torch.randint(1, 14, (pick(1, 2, 4),), generator=draw)]
    flags = {name: pick(False, True) for name in ("norm_before_residual", "fc_norm", "norm_output")}
    if form == "llama":
        flags["norm_before_fc"] = pick(False, True)
    else:
        flags["q_lora_rank"] = pick(0, 12)
    vocab = pick(24, 128)
    c = config(form, vocab, pick(vocab, vocab // 2, vocab - 5), **flags)
    pack = make_pack(lengths, vocab, seed, pick("suffix", "suffix", "holes", "all"))
    Case(c, pack, seed, pick(1, 2, 3, 5, 7), pick(0.8, 1.0)).check()


@pytest.mark.parametrize("mask", ["suffix", "holes", "all", "none"])
@pytest.mark.parametrize("form", ["llama", "mla"])
def test_masks(form, mask):
    Case(config(form, draft_vocab=15), make_pack([11, 1, 2, 3, 9], 24, 5, mask)).check()


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_options_one_by_one(name):
    Case(config(**{name: True}), make_pack([9, 6], 24, 3), steps=3).check()


@pytest.mark.parametrize(
    ("form", "scaling"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("llama", LLAMA3),
        ("llama", YARN),
        ("llama", {k: v for k, v in YARN.items() if not k.startswith("mscale")}),
        ("mla", YARN),
        ("mla", YARN | {"mscale_all_dim": 1.0, "factor": 64.0}),
        ("mla", {k: v for k, v in YARN.items() if not k.startswith("mscale")}),
    ],
)
def test_rope_scaling(form, scaling):
    """Scaled frequencies come from transformers, in float32: hence the tolerance."""
    Case(config(form, rope_scaling=scaling, rope_theta=500.0), make_pack([20], 24, 1), steps=3).check(1e-4)


def test_trained_embedding_and_frozen_head():
    case = Case(config(draft_vocab=15), make_pack([12, 7], 24, 2))
    case.draft.embed_tokens.weight.requires_grad_(True)
    case.draft.lm_head.weight.requires_grad_(False)
    case.check()
    assert "embed_tokens.weight" in case.fast()[1]


def test_without_gradient_the_same_figures():
    case = Case(config(draft_vocab=15), make_pack([12, 7], 24, 2))
    result, _ = case.fast()
    with torch.no_grad():
        evaluated = case.module()(case.pack)
    assert not evaluated.loss.requires_grad
    for name in ("loss", "loss_sums", "counts", "right_token", "right_argmax", "in_step"):
        assert torch.equal(getattr(result, name), getattr(evaluated, name)), name


def test_a_pack_without_loss_positions_still_has_a_backward():
    """Ranks must take part in every all-reduce, whatever their own pack holds."""
    result, gradients = Case(config(), make_pack([5, 4], 24, 0, "none")).fast()
    assert result.loss.item() == 0.0 and result.counts.tolist() == [0] * 4
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_counts_make_two_packs_as_good_as_one():
    """Accumulation and ranks: with the counts of all packs given, losses and gradients just add up."""
    case = Case(config(draft_vocab=15), make_pack([9, 12, 6, 7], 24, 4))
    whole, expected = case.fast()
    border, offsets = int(case.pack.offsets[2]), case.pack.offsets
    parts = ((slice(0, border), offsets[:3]), (slice(border, None), offsets[2:] - border))
    halves = [Pack(*(x[rows] for x in tensors(case.pack)), offsets=borders, ids=[]) for rows, borders in parts]
    counts = sum(half.loss_positions.counts(case.steps) for half in halves)
    assert counts.tolist() == whole.counts.tolist()
    loss, total = 0.0, {name: torch.zeros_like(gradient) for name, gradient in expected.items()}
    for half in halves:
        result, gradients = case.fast(half, counts)
        loss += result.loss.item()
        for name, gradient in gradients.items():
            total[name] += gradient
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)


def tensors(pack: Pack):
    return pack.input_ids, pack.loss_mask, pack.aux_hidden, pack.last_hidden


def test_case_22_prompt_border_and_right_edge():
    """4 prompt + 3 answer tokens: x_4..x_6 are written, so the positions are 3 and 4 (x_5, x_6 are predicted)."""
    written = torch.tensor([0, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    pack = replace(make_pack([7], 24, 0), loss_mask=written, loss_positions=None)
    plan = pack.loss_positions
    assert plan.positions.tolist() == [3, 4]
    assert plan.counts(3).tolist() == [2, 1, 0]
    assert plan.in_step(3).tolist() == [[True, True], [True, False], [False, False]]
    case = Case(config(), pack, steps=3)
    case.check()
    pack.aux_hidden.requires_grad_(True)
    case.module()(pack).loss.backward()
    reached = pack.aux_hidden.grad.abs().sum(1) > 0
    assert reached.tolist() == [True] * 5 + [False] * 2  # the last prompt position learns, nothing past position 4 does


def test_case_23_prompt_length_does_not_change_the_average():
    """The same answer after 10 and after 1,000 prompt tokens, attention silenced: equal loss per token."""
    losses = []
    for prompt in (10, 1000):
        pack = make_pack([40], 24, 7)
        answer = tuple(x[10:] for x in tensors(pack))
        zeros = [torch.zeros((prompt, *x.shape[1:]), dtype=x.dtype) for x in answer]
        joined = [torch.cat(pair) for pair in zip(zeros, answer, strict=True)]
        joined[1][prompt:] = True
        pack = Pack(*joined, offsets=torch.tensor([0, prompt + 30]), ids=["x"])
        case = Case(config(), pack, steps=3)
        with torch.no_grad():  # without attention's output, prompts can only matter through the average
            case.draft.midlayer.self_attn.o_proj.weight.zero_()
        result, _ = case.fast()
        losses.append((result.loss.item(), result.counts.tolist()))
    assert losses[0][1] == losses[1][1] == [29, 28, 27]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-9)


@pytest.mark.parametrize("form", ["llama", "mla"])
def test_case_29_packed_documents_do_not_see_each_other(form):
    """Changing every token and state of one document leaves the other's figures as they are, at all steps."""
    pack = make_pack([13, 11], 24, 8, "all")
    case = Case(config(form), pack, steps=5)
    other = make_pack([13, 11], 24, 9, "all")
    border = 13
    for keep in (slice(0, border), slice(border, None)):
        mixed = [x.clone() for x in tensors(other)]
        for mine, x in zip(mixed, tensors(pack), strict=True):
            mine[keep] = x[keep]
        # loss on the kept document only: the other one's mask is off, but its tokens and states are there
        mixed[1] = torch.zeros_like(mixed[1])
        mixed[1][keep] = True
        mixed = Pack(*mixed, offsets=pack.offsets, ids=[])
        alone = Pack(
            *(x[keep].clone() for x in tensors(pack)), offsets=torch.tensor([0, len(pack.input_ids[keep])]), ids=[]
        )
        together, first = case.fast(mixed)
        separate, second = case.fast(alone)
        assert together.loss.item() == pytest.approx(separate.loss.item(), rel=1e-12)
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
        assert torch.equal(together.right_token, separate.right_token)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["llama", "mla"])
def test_bf16_stays_close(form, compiled, monkeypatch):
    """The type that trains, against float64: same loss to a percent, gradients that point the same way."""
    monkeypatch.setattr("common.draft.kernels._compiled", False)  # the switch comes back to what it was
    case = Case(config(form, vocab=128, draft_vocab=100), make_pack([60, 45, 70], 128, 6), steps=5)
    wanted, expected = case.fast()
    case.draft.float()
    compile_loops(compiled)
    result, gradients = case.fast(dtype=torch.bfloat16)
    assert result.loss.item() == pytest.approx(wanted.loss.item(), rel=0.01)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        a, b = gradient.double().flatten(), expected[name].flatten()
        assert float(a @ b / (a.norm() * b.norm())) > 0.98, name
        assert math.isclose(float(a.norm()), float(b.norm()), rel_tol=0.1), name
    agree = (result.right_argmax == wanted.right_argmax).float().mean()
    assert float(agree) > 0.95
