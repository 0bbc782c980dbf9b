"""A draft, a target and a pack of a few tokens, and both ways to compute the unrolled step on them."""

import torch

from common.dataset.packs import Pack
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.draft.unrolled_step import UnrolledStep
from tests.support import reference

HIDDEN, AUX = 16, 3


def config(form="llama", vocab=24, draft_vocab=24, **options) -> DraftConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 20, "vocab_size": vocab, "draft_vocab_size": draft_vocab}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    if form == "mla":
        heads |= {"num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 12}
        heads |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return DraftConfig(form=form, **{**sizes, **heads, **options})


def make_draft(c: DraftConfig, seed: int) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    draft = Draft(c, torch.randn(c.vocab_size, HIDDEN, generator=generator))
    draft.initialise(None, seed, std=0.3)
    with torch.no_grad():  # norm weights away from one, so that each of them is seen
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return draft.double()


def make_pack(lengths, vocab, seed, mask="suffix") -> Pack:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    masks = []
    for length in lengths:
        if mask == "suffix":
            prompt = int(torch.randint(0, length + 1, (), generator=generator))
            masks.append(torch.arange(length) >= prompt)
        else:
            masks.append(torch.rand(length, generator=generator) < {"all": 2.0, "none": 0.0, "holes": 0.75}[mask])
    states = torch.randn(tokens, (AUX + 1) * HIDDEN, generator=generator, dtype=torch.float64)
    return Pack(
        input_ids=torch.randint(0, vocab, (tokens,), generator=generator),
        loss_mask=torch.cat(masks),
        aux_hidden=states[:, : AUX * HIDDEN].contiguous(),
        last_hidden=states[:, AUX * HIDDEN :].contiguous(),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=[f"document-{k}" for k in range(len(lengths))],
    )


class Case:
    """A draft, a target and a pack, and both ways to compute the step on them."""

    def __init__(self, c, pack, seed=0, steps=4, step_weight=0.8, **options):
        self.c, self.pack, self.steps, self.step_weight, self.options = c, pack, steps, step_weight, options
        generator = torch.Generator().manual_seed(seed + 1000)
        self.draft = make_draft(c, seed)
        self.head = torch.randn(c.vocab_size, HIDDEN, generator=generator, dtype=torch.float64)
        self.norm = torch.rand(HIDDEN, generator=generator, dtype=torch.float64) + 0.5
        kept = torch.randperm(c.vocab_size, generator=generator)[: c.draft_vocab_size].sort().values
        self.kept = None if c.draft_vocab_size == c.vocab_size else kept

    def module(self, dtype=torch.float64, **options) -> UnrolledStep:
        arguments = (self.draft, self.norm, 1e-6, self.head, self.kept, self.steps, self.step_weight)
        return UnrolledStep(*arguments, dtype=dtype, **self.options, **options)

    def fast(self, pack=None, counts=None, dtype=torch.float64, **options):
        """-> result, {name: gradient}"""
        result = self.module(dtype, **options)(pack or self.pack, counts)
        self.draft.zero_grad()
        result.loss.backward()
        return result, {name: p.grad.clone() for name, p in self.draft.named_parameters() if p.requires_grad}

    def slow(self):
        names = dict(self.draft.named_parameters())
        p = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in names.items()}
        pack = {
            name: getattr(self.pack, name)
            for name in ("input_ids", "loss_mask", "aux_hidden", "last_hidden", "offsets")
        }
        found = reference.unrolled_step(
            *(p, self.c),
            **pack,
            target_norm=self.norm,
            target_norm_eps=1e-6,
            target_head=self.head,
            draft_to_target=self.kept,
            steps=self.steps,
            step_weight=self.step_weight,
            **self.options,
        )
        if found[0].requires_grad:
            found[0].backward()
        return found, {name: x.grad for name, x in p.items() if x.requires_grad}

    def check(self, tolerance=1e-9):
        result, gradients = self.fast()
        (loss, sums, counts, right), expected = self.slow()
        assert result.counts.tolist() == counts.tolist()
        torch.testing.assert_close(result.loss.detach(), loss.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(result.loss_sums, sums.detach(), rtol=tolerance, atol=tolerance)
        for name, gradient in gradients.items():
            wanted = torch.zeros_like(gradient) if expected[name] is None else expected[name]
            torch.testing.assert_close(
                gradient, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        steps = {
            (s, int(i)): (bool(result.right_token[s, n]), bool(result.right_argmax[s, n]))
            for s in range(self.steps)
            for n, i in enumerate(result.positions)
            if result.in_step[s, n]
        }
        assert steps == right
