"""Made-up states in the folders that 02 and 03 leave, so small that 04 takes milliseconds a step; 04 run on them."""

import json
from array import array
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.dataset.draft_vocabulary import choose_tokens, mappings
from common.dataset.index import HELD_OUT, TRAIN, IndexBuilder
from common.dataset.shard_layout import ShardKind
from common.dataset.shards import Shard, ShardWriter, States
from common.dataset.stream import Stream
from common.pipeline.files import write_json
from common.pipeline.manifest import Manifest
from common.pipeline.settings import Dataset
from tests.support.stages import DEMO, run_here

VOCAB, HIDDEN, LAYERS = 64, 16, (1, 2, 3)
TEXT = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
TEXT |= {"vocab_size": VOCAB, "max_position_embeddings": 256, "num_hidden_layers": 6}
PROTOCOL = {"think_open": 15, "think_close": 16, "end": 2}
SHARD = "shard-00000.safetensors"
# A test's own flags come after these: of a flag that is given twice the second counts.
FLAGS = ("--no-compile", "--precision", "fp32", "--learning-rate", 0.02, "--unrolled-steps", 2, "--epochs", 1)
FLAGS += ("--pack-tokens", 64)  # several packs out of so few tokens
EXACT = ("kind", "step", "tokens", "loss", "step_loss", "grad_norm", "learning_rate", "walk")


def sequence(number: int, generator: torch.Generator) -> tuple[Stream, States]:
    """A reply that counts upwards in steps of its own, with states that tell the next token."""
    tokens = 12 + number % 9
    ids = torch.tensor([20 + (number + i * (1 + number % 3)) % 40 for i in range(tokens)])
    ids[4], ids[9] = PROTOCOL["think_open"], PROTOCOL["think_close"]
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(tokens, 4 * HIDDEN, generator=generator) * 0.1
    states = (table[ids.roll(-1)].repeat(1, 4) + noise).bfloat16()
    facts = {"question": f"q{number}", "source": "made up", "finish": "stop", "reasoning": 4, "temperature": 0.0}
    mask = array("B", [i > 4 for i in range(tokens)])
    stream = Stream(f"id{number:02d}", array("i", ids.tolist()), mask, facts)
    return stream, States(states[:, : 3 * HIDDEN].contiguous(), states[:, 3 * HIDDEN :].contiguous())


def build(folder: Path, draft_vocab_size: int = 32, holdout_share: float = 0.25, count: int = 24) -> Path:
    """Write 02_hidden and 03_dataset of a run; the target's head is the table that made the states."""
    generator = torch.Generator().manual_seed(0)
    samples = [sequence(number, generator) for number in range(count)]
    hidden, dataset = folder / "02_hidden", folder / "03_dataset"
    for path in (hidden, dataset):
        path.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(hidden / SHARD, [stream for stream, _ in samples], ShardKind("t", "d", HIDDEN, LAYERS))
    for stream, states in samples:
        writer.write(stream.id, states)
    writer.finish()

    settings = Dataset(draft_vocab_size=draft_vocab_size, holdout_share=holdout_share, sample_tokens=64)
    builder = IndexBuilder(settings, VOCAB)
    builder.add(SHARD, Shard(hidden / SHARD))
    index = builder.build()
    kept = choose_tokens(builder.counts, draft_vocab_size, sorted(PROTOCOL.values()))
    d2t, t2d = mappings(kept, VOCAB)
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    index.save(dataset / "index.safetensors")
    save_file({"d2t": d2t, "t2d": t2d, "counts": builder.counts}, dataset / "vocab.safetensors")
    head = {"norm": torch.ones(HIDDEN).bfloat16(), "lm_head": table, "embedding": table.clone()}
    save_file(head, dataset / "target_head.safetensors")
    write_json(dataset / "target.json", {"text": TEXT, "eps": 1e-5, "aux_layers": list(LAYERS), "protocol": PROTOCOL})
    fingerprint = {"dataset.draft_vocab_size": draft_vocab_size, "dataset.holdout_share": holdout_share}
    manifest = Manifest("03_dataset", fingerprint, {"dataset": {"sample_tokens": 64}}, complete=True)
    manifest.counts = {"train": len(index.rows(TRAIN)), "held_out": len(index.rows(HELD_OUT))}
    for name in ("index.safetensors", "vocab.safetensors", "target_head.safetensors", "target.json"):
        manifest.add_file(dataset, name)
    manifest.save(dataset)
    return folder


def train(run: Path, *flags: object, **replaced: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of 04 on such a run, in this process; `replaced`: see `run_here`."""
    return run_here("04", "--config", DEMO, "--run-dir", run, *FLAGS, *flags, **replaced)


def metrics(run: Path, kind: str | None = None) -> list[dict]:
    """The lines of 04's metrics.jsonl, those of one kind or all; none where the file does not exist yet."""
    path = run / "04_draft/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if kind in (None, line["kind"])]


def losses(run: Path) -> list[tuple]:
    """What each step and each evaluation gave, to the last bit; times and rates are left out."""
    return [tuple(json.dumps(line.get(key)) for key in EXACT) for line in metrics(run)]


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the exported draft."""
    return load_file(run / "04_draft/export/model.safetensors")
