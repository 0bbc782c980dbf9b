"""A target with random weights and 36 made-up records: 02, 03 and 04 run on them in seconds, one after the other or at
the same time."""

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import torch

from common.pipeline.jsonl import JsonlParts
from common.pipeline.manifest import Manifest
from tests.support import tiny_training
from tests.support.stages import ROOT, command, only_error, run_here
from tests.support.targets import build_tiny_target, tiny_protocol

ENV = os.environ | {"OMP_NUM_THREADS": "1"}  # few cores for three processes; one thread gives the same bits in each

BYTES_A_TOKEN = 4 * 32 * 2 + 5
SHARD_TOKENS = 60  # about three samples
CONFIG = """
[target]
model = {model}
end_token = "<|im_end|>"
[extract]
extractor = "local"
aux_layers = [1, 2, 4]
shard_gib = {shard_gib}
batch_tokens = 1  # each sample by itself: the other samples of a batch change the last bit of bf16
[dataset]
draft_vocab_size = 0
holdout_share = 0.2
sample_tokens = 64
[train]
pack_tokens = 64
epochs = 2.0
unrolled_steps = 2
eval_steps = 3
learning_rate = 0.01
precision = "fp32"
compile = false
eval_every = 12
"""


CONSTANTS = {
    "common.extraction.on_policy.CHECK_FIRST": 0,  # random weights wrote none of this
    "common.training.checkpoint.KEEP_CHECKPOINTS": 1,
}


def build(folder: Path) -> Path:
    """Write everything that 02 needs into `folder`: the target, a config for it, records. Returns the config's path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    target = build_tiny_target(folder / "target")
    protocol = tiny_protocol(target)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": len(protocol.tokenizer), "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16).save_pretrained(target)
    config = folder / "tiny.toml"
    shard_gib = SHARD_TOKENS * BYTES_A_TOKEN / 2**30
    config.write_text(CONFIG.format(model=json.dumps(str(target)), shard_gib=repr(shard_gib)))

    source, rng = folder / "run/01_synthetic", random.Random(0)
    source.mkdir(parents=True)
    parts = JsonlParts(source)
    for number in range(36):
        prompt = [rng.randrange(200) for _ in range(5)] + [protocol.think_open]
        output = [(number + 3 * i) % 200 for i in range(rng.randrange(8, 18))]
        output[4:5] = [protocol.think_close]
        question = {"dataset": "made up", "question": f"question {number}"}
        ids = {"prompt_ids": prompt, "output_ids": [*output, protocol.end]}
        parts.append({"id": f"{number:064x}", "source": question, "finish_reason": "stop", **ids})
    parts.close()
    manifest = Manifest("01_synthetic", {"target.model": str(target)}, complete=True)
    manifest.add_file(source, "part-00000.jsonl")
    manifest.save(source)
    return config


class RandomTargetRun:
    """A copy of these records in a run folder of its own. A stage runs in this process, or in one beside it."""

    def __init__(self, records: Path, run: Path):
        self.run, self.config, self.hidden = run, records / "tiny.toml", run / "02_hidden"
        shutil.copytree(records / "run", run)

    def flags(self, *more: object) -> list[object]:
        return ["--config", self.config, "--run-dir", self.run, *more]

    def here(self, stage: str, *more: object, **replaced) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a stage in this process."""
        return run_here(stage, *self.flags(*more), constants=CONSTANTS, **replaced)

    def done(self, stage: str, *more: object, **replaced) -> str:
        """What a stage prints that must end with exit code 0."""
        code, out, stderr = self.here(stage, *more, **replaced)
        assert code == 0, stderr
        return out

    def refused(self, stage: str, *more: object) -> str:
        """The one error line of a stage that must end with exit code 2."""
        code, _, stderr = self.here(stage, *more)
        assert code == 2, stderr
        return only_error(stderr)

    def beside(self, stage: str, *more: object, ranks: int = 1) -> subprocess.Popen:
        """Start a stage as a process, under torchrun for several ranks; its output goes to log-STAGE."""
        argv = command(stage, *self.flags(*more), constants=CONSTANTS)
        if ranks > 1:
            argv[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with open(self.run / f"log-{stage}", "a") as log:
            return subprocess.Popen(argv, cwd=ROOT, env=ENV, stdout=log, stderr=log)

    def until(self, reached, *processes: subprocess.Popen) -> None:
        """Wait until `reached()`, at most 30 s; fails when one of the processes ends before."""
        for _ in range(6000):
            if reached():
                return
            assert all(process.poll() is None for process in processes), self.logs()
            time.sleep(0.005)
        raise AssertionError(self.logs())

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.run.glob("log-*"))

    def planned(self) -> bool:
        """Whether 02 has written which samples go into which shard."""
        return (self.hidden / "plan/manifest.json").exists()

    def written(self) -> int:
        """How many shards 02 has entered in its manifest."""
        return len(json.loads((self.hidden / "manifest.json").read_text())["files"])

    def metrics(self, kind: str = "train") -> list[dict]:
        return tiny_training.metrics(self.run, kind)

    def losses(self) -> list[tuple]:
        return tiny_training.losses(self.run)

    def shards(self) -> list[str]:
        return sorted(path.name for path in self.hidden.glob("*.safetensors"))

    def bytes_there(self) -> int:
        """Bytes of all shards on disk, of unfinished ones too."""
        total = 0
        for path in self.hidden.glob("*shard-*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # deleted or renamed since the listing
                continue
        return total
