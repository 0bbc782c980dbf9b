"""The acceptance walk of stage 04, reply by reply, with the exported draft: stage 04 itself reports only the sums."""

import torch
from safetensors.torch import load_file

from common.dataset.draft_vocabulary import kept_tokens
from common.dataset.index import HELD_OUT, Index
from common.dataset.packs import Packs
from common.draft.network import Draft
from common.draft.unrolled_step import UnrolledStep
from common.export.served_config import read_draft_config
from common.pipeline.files import read_json
from common.training.acceptance import accepted_lengths, walk
from common.training.held_out import HeldOut
from tests.end_to_end.pipeline_run import Run


@torch.inference_mode()
def reply_walks(run: Run, k: int) -> dict[str, list[int]]:
    """By sample id, how many tokens of each draft an engine would accept along the recorded reply."""
    dataset, export = run.folder / "03_dataset", run.folder / "04_draft" / "export"
    facts, vocab = read_json(dataset / "target.json"), load_file(dataset / "vocab.safetensors")
    target, weights = load_file(dataset / "target_head.safetensors"), load_file(export / "model.safetensors")
    draft = Draft(read_draft_config(read_json(export / "config.json")), target["embedding"])
    named = {name: weights[name].float() for name, _ in draft.named_parameters() if name != "embed_tokens.weight"}
    missing, unknown = draft.load_state_dict(named, strict=False)
    assert missing == ["embed_tokens.weight"] and not unknown, (missing, unknown)
    kept = kept_tokens(vocab["d2t"], vocab["t2d"])
    step = UnrolledStep(draft, target["norm"], facts["eps"], target["lm_head"], kept, steps=k)
    pack_tokens = run.manifest("03_dataset").settings["dataset"]["sample_tokens"]
    packs = Packs(run.folder / "02_hidden", Index.load(dataset / "index.safetensors"), pack_tokens)
    markers = facts["protocol"]["think_open"], facts["protocol"]["think_close"]
    held_out = HeldOut(packs, packs.pack_split(HELD_OUT, None), *markers)
    walks = {}
    for rows in held_out.schedule:
        pack = packs.load(rows)
        result = step(pack)
        positions, at = pack.loss_positions.positions, 0
        for reply in held_out.replies(pack, result.right_token, positions):
            document = int(torch.searchsorted(pack.offsets[1:], positions[at], right=True))
            walks[pack.ids[document]] = [accepted for _, accepted in walk(accepted_lengths(reply.right, k))]
            at += reply.right.shape[1]
    return walks
