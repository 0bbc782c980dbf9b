"""The memory of a training step as common/forecast/arithmetic.py predicts it, beside what torch's allocator counted.

    python tests/bench/memory.py                    several shapes on the CPU
    python tests/bench/memory.py --device cuda      Kimi-K2.5's shapes on a GPU

On the CPU the count is the profiler's ("Total Allocated" after each allocation), on CUDA max_memory_allocated.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.draft.unrolled_step import UnrolledStep
from common.forecast.arithmetic import GIB, training_memory
from tests.bench.train_step import KIMI, SMOLLM2, make_pack

MLA = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
SMALL = replace(SMOLLM2, vocab_size=4096, draft_vocab_size=1024)
CASES = {  # sizes in which another part is the largest
    "head": (replace(SMOLLM2, vocab_size=24576), 256, 0.8, 3),
    "activations": (SMALL, 512, 1.0, 5),
    "prompts": (SMALL, 1024, 0.3, 5),
    "weights": (replace(SMALL, hidden_size=768, intermediate_size=3072, num_key_value_heads=9), 256, 1.0, 3),
    "mla": (replace(SMALL, form="mla", num_key_value_heads=9, **MLA), 512, 0.8, 4),
}


def two_steps(config: DraftConfig, tokens: int, supervised: float, steps: int, device: str) -> None:
    """Build a draft and take two AdamW steps, the second with the optimizer's state there."""
    with torch.device(device):
        draft = Draft(config, torch.randn(config.vocab_size, config.hidden_size).bfloat16())
        head = torch.randn(config.vocab_size, config.hidden_size).bfloat16()
        kept = torch.arange(config.draft_vocab_size)
        draft.initialise(None, 0)
        unrolled = UnrolledStep(draft, torch.ones(config.hidden_size), 1e-5, head, kept, steps)
    packs = [make_pack(config, tokens, min(tokens, 512), supervised).to(device) for _ in range(2)]  # one is read ahead
    trained = [p for p in unrolled.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for pack in packs:
        unrolled(pack).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measured(config: DraftConfig, tokens: int, supervised: float, steps: int, device: str = "cpu") -> float:
    """Highest count of allocated bytes in `two_steps`."""
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


def planned(config: DraftConfig, tokens: int, supervised: float, steps: int) -> dict[str, float]:
    return training_memory(config, tokens, round(tokens * supervised), steps, ranks=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    for name, case in (CASES if device == "cpu" else {"kimi": (KIMI, 8192, 0.95, 7)}).items():
        parts, peak = planned(*case), measured(*case, device)
        total = sum(parts.values())
        print(f"{name:12} planned {total / GIB:7.3f} GiB, measured {peak / GIB:7.3f} GiB, ratio {total / peak:.2f}")
        print("   " + "  ".join(f"{part} {size / GIB:.3f}" for part, size in parts.items()))


if __name__ == "__main__":
    main()
