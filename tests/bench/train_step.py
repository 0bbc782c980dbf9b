"""How fast one training step with AdamW is, compared with this machine's matrix products and with speculators' step.

    python tests/bench/train_step.py                            2,048 tokens, 7 unrolled steps, loss on every token
    python tests/bench/train_step.py --supervised 0.4           the usual case: prompts are read, but have no loss
    python tests/bench/train_step.py --tokens 1024 --steps 3 --peer     also speculators 0.9.0, where it is installed
    python tests/bench/train_step.py --device cuda              Kimi-K2.5's shapes

The last line is for scripts: tok_s= gemm_share= peak_gib= peer_tok_s= speedup=
"""

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time

import repository  # noqa: F401
import torch

from common.draft.kernels import compile_loops, keep_freed_memory
from common.draft.network import Draft
from common.draft.unrolled_step import StepResult, UnrolledStep
from common.training.utilisation import pack_flops
from tests.support.step_memory import KIMI, SMOLLM2, make_pack


class GemmRate:
    """The rate of bf16 products on this machine, measured between the steps, since other processes may slow both."""

    def __init__(self, device: str):
        self.size = 8192 if device == "cuda" else 2048
        self.a = torch.randn(self.size, self.size, device=device).bfloat16()
        self.out, self.seconds = torch.empty_like(self.a), []

    def measure(self) -> None:
        for _ in range(3):
            self.seconds.append(timed(lambda: torch.mm(self.a, self.a, out=self.out)))

    def flops(self) -> float:
        return 2 * self.size**3 / min(self.seconds)


def timed(work) -> float:
    # One thread is timed in CPU seconds, which other processes on the machine hardly change.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def ours(arguments: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    cuda = arguments.device == "cuda"
    config = KIMI if cuda else SMOLLM2
    with torch.device(arguments.device):
        draft = Draft(config, torch.randn(config.vocab_size, config.hidden_size).bfloat16())
        head = (torch.randn(config.vocab_size, config.hidden_size) * 0.05).bfloat16()
        kept = torch.arange(config.draft_vocab_size)
        draft.initialise(head[kept], 0)
        arguments_ = (draft, torch.ones(config.hidden_size), 1e-5, head, kept, arguments.steps)
        step = UnrolledStep(*arguments_)
    keep_freed_memory()
    compile_loops(not arguments.eager)
    pack = make_pack(config, arguments.tokens, arguments.document_tokens, arguments.supervised)
    flops = pack_flops(config, pack, arguments.steps)
    pack = pack.to(arguments.device)
    trained = [p for p in step.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    gemm = GemmRate(arguments.device)

    def once() -> StepResult:
        result = step(pack)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the next step needs the buffers again
        return result

    first, _ = timed(once), timed(once)
    seconds = []
    for _ in range(arguments.repeats):
        gemm.measure()
        seconds.append(timed(once))
    if arguments.profile:
        with torch.profiler.profile(record_shapes=True) as profile:
            once()
        print(profile.key_averages(group_by_input_shape=arguments.shapes).table("self_cpu_time_total", row_limit=45))
    best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
    print(f"first step {first:.1f} s, then best {best * 1e3:.0f} ms, median {median * 1e3:.0f} ms")
    print(f"{flops / 1e9:.0f} GFLOP a step: {flops / best / 1e12:.2f} TFLOP/s, products {gemm.flops() / 1e12:.2f}")
    return {"tok_s": arguments.tokens / best, "gemm_share": flops / best / gemm.flops(), "peak_gib": peak_gib(cuda)}


def peer(arguments: argparse.Namespace) -> dict:
    """speculators' own model and forward on the same pack, in bf16 with eager attention."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    torch.manual_seed(0)
    c = SMOLLM2
    layer = LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        num_hidden_layers=1,
        max_position_embeddings=c.max_position_embeddings,
        attn_implementation="eager",
    )
    settings = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=arguments.steps)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=c.draft_vocab_size, speculators_config=settings
        )
    ).to(torch.bfloat16)
    trained = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("verifier_")]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    pack = make_pack(c, arguments.tokens, arguments.document_tokens, arguments.supervised)
    documents = torch.arange(len(pack.ids)).repeat_interleave(pack.offsets.diff())
    batch = {  # shifted by one as its loader does, documents end to end
        "hidden_states": pack.aux_hidden,
        "input_ids": pack.input_ids.roll(-1),
        "document_ids": documents,
        "loss_mask": pack.loss_mask.roll(-1),
        "verifier_last_hidden_states": pack.last_hidden.roll(-1, 0),
    }
    batch = {name: x.unsqueeze(0) for name, x in batch.items()}

    kl = resolve_loss_config("kl_div", "eager")  # its default, without Triton

    def once():
        _, loss, _ = model(**batch, ttt_steps=arguments.steps, loss_config=kl)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    once()
    best = min(timed(once) for _ in range(max(1, arguments.repeats // 2)))
    return {"peer_tok_s": arguments.tokens / best, "peer_peak_gib": peak_gib(False)}


def peer_apart() -> dict:
    """`peer` in a process of its own, so that the memory of each is counted alone."""
    try:
        importlib.metadata.version("speculators")
    except importlib.metadata.PackageNotFoundError:
        print("speculators is not installed here: no peer to compare with")
        return {"peer_tok_s": float("nan"), "peer_peak_gib": float("nan")}
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    run = subprocess.run([sys.executable, *sys.argv, "--only-peer"], capture_output=True, text=True, env=environment)
    if run.returncode:
        raise SystemExit(f"the peer's step failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def peak_gib(cuda: bool) -> float:
    if cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in the pack (default %(default)s)")
    parser.add_argument("--document-tokens", type=int, default=512, help="tokens a document (default %(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="unrolled steps (default %(default)s)")
    parser.add_argument(
        "--supervised", type=float, default=1.0, help="share of a document that has loss (default %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--repeats", type=int, default=7, help="steps to time; the best one counts (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 takes all, 1 is timed in CPU seconds")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--profile", action="store_true", help="print where one step's time goes")
    parser.add_argument("--shapes", action="store_true", help="with --profile: by shape")
    parser.add_argument("--peer", action="store_true", help="also run speculators' step, in a process of its own")
    parser.add_argument("--only-peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.only_peer:
        print(json.dumps(peer(arguments)))
        return
    results = ours(arguments) | {"peer_tok_s": float("nan")}
    if arguments.peer:
        other = peer_apart()
        print(f"peer: {other['peer_tok_s']:.0f} tokens/s, {other['peer_peak_gib']:.2f} GiB")
        results["peer_tok_s"] = other["peer_tok_s"]
    results["speedup"] = results["tok_s"] / results["peer_tok_s"]
    print(" ".join(f"{name}={value:.0f}" if value >= 100 else f"{name}={value:.3g}" for name, value in results.items()))


if __name__ == "__main__":
    main()
