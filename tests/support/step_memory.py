"""Training steps on made-up packs, and their memory: as torch counts it and as the forecast predicts it."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from common.dataset.packs import Pack
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.draft.unrolled_step import UnrolledStep
from common.forecast.arithmetic import training_memory

SMOLLM2 = DraftConfig("llama", 576, 1536, 9, 3, 64, vocab_size=49152, draft_vocab_size=8192)
KIMI = DraftConfig("llama", 7168, 18432, 64, 64, 128, vocab_size=163840, draft_vocab_size=32000, rope_theta=50000.0)
MLA = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
SMALL = replace(SMOLLM2, vocab_size=4096, draft_vocab_size=1024)
CASES = {  # (config, tokens, supervised share, steps): in each another kind of memory is the largest
    "head": (replace(SMOLLM2, vocab_size=24576), 256, 0.8, 3),
    "activations": (SMALL, 512, 1.0, 5),
    "prompts": (SMALL, 1024, 0.3, 5),
    "weights": (replace(SMALL, hidden_size=768, intermediate_size=3072, num_key_value_heads=9), 256, 1.0, 3),
    "mla": (replace(SMALL, form="mla", num_key_value_heads=9, **MLA), 512, 0.8, 4),
}


def make_pack(config: DraftConfig, tokens: int, document_tokens: int, supervised: float) -> Pack:
    """A pack of random tokens and states in documents of this length; the last `supervised` share of each has loss."""
    lengths = [document_tokens] * (tokens // document_tokens)
    lengths += [tokens - sum(lengths)] if sum(lengths) < tokens else []
    masks = [torch.arange(n) >= round(n * (1 - supervised)) for n in lengths]
    states = torch.randn(tokens, (config.num_aux + 1) * config.hidden_size).bfloat16()
    split = config.num_aux * config.hidden_size
    return Pack(
        input_ids=torch.randint(0, config.vocab_size, (tokens,)),
        loss_mask=torch.cat(masks),
        aux_hidden=states[:, :split].contiguous(),
        last_hidden=states[:, split:].contiguous(),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=[str(k) for k in range(len(lengths))],
    )


def two_steps(config: DraftConfig, tokens: int, supervised: float, steps: int, device: str) -> None:
    """Build a draft and take two AdamW steps; in the second the optimizer has its state."""
    with torch.device(device):
        draft = Draft(config, torch.randn(config.vocab_size, config.hidden_size).bfloat16())
        head = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
        kept = torch.arange(config.draft_vocab_size)
        draft.initialise(None, 0)
        unrolled = UnrolledStep(draft, torch.ones(config.hidden_size), 1e-5, head, kept, steps)
    packs = [make_pack(config, tokens, min(tokens, 512), supervised).to(device) for _ in range(2)]
    trained = [p for p in unrolled.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for pack in packs:
        unrolled(pack).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measured(config: DraftConfig, tokens: int, supervised: float, steps: int, device: str = "cpu") -> float:
    """The most bytes that `two_steps` has at a time: the profiler's count on the CPU, the allocator's on CUDA."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        two_steps(config, tokens, supervised, steps, device)
        return torch.cuda.max_memory_allocated()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        two_steps(config, tokens, supervised, steps, device)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    events = [event["args"] for event in events if event.get("name") == "[memory]"]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


def predicted(config: DraftConfig, tokens: int, supervised: float, steps: int) -> dict[str, float]:
    return training_memory(config, tokens, round(tokens * supervised), steps, ranks=1)
