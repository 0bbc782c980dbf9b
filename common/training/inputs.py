"""The inputs of training: the data set of stage 03, its packs in order, the target's head, the draft's sizes."""

from safetensors.torch import load_file

from common.dataset.draft_vocabulary import coverage, kept_tokens
from common.dataset.index import HELD_OUT, Index
from common.dataset.packs import Packs
from common.draft.config import draft_config
from common.draft.network import Draft
from common.export.warm_start import read_published
from common.pipeline.command_line import Settings
from common.pipeline.files import read_json
from common.pipeline.manifest import DATASET, HIDDEN, Manifest
from common.training.batches import PackOrder
from common.training.disk_budget import Follower, follow
from common.training.held_out import HeldOut
from common.training.optimizer import check_settings
from common.training.ranks import Ranks


class Inputs:
    """Reads RUN/03_dataset and RUN/02_hidden. `follower` is None unless 02 runs with a disk budget."""

    def __init__(self, settings: Settings, dataset: Manifest, ranks: Ranks):
        s, source, states = settings.train, settings.run_dir / DATASET, settings.run_dir / HIDDEN
        facts, vocab = read_json(source / "target.json"), load_file(source / "vocab.safetensors")
        self.text, self.eps, self.aux_layers = facts["text"], facts["eps"], tuple(facts["aux_layers"])
        self.target = load_file(source / "target_head.safetensors")  # norm [H], lm_head [V, H], embedding [V, H]
        self.d2t, self.t2d = vocab["d2t"], vocab["t2d"]
        self.config = draft_config(settings.draft, self.text, self.eps, len(self.aux_layers), len(self.d2t))
        self.published = None
        if s.warm_start:
            self.published = read_published(s.warm_start, self.config, self.aux_layers)
            self.config, self.d2t, self.t2d = self.published.config, self.published.d2t, self.published.t2d
        self.kept = kept_tokens(self.d2t, self.t2d)  # int64 [D] target ids
        self.coverage = coverage(vocab["counts"], self.kept)

        self.counts, index = dataset.counts, Index.load(source / "index.safetensors")
        check_settings(s, ranks, int(index.length.max()))
        budget = follow(states, dataset, settings.switches.follow, settings.fresh)
        self.follower = Follower(budget, index, s.pack_tokens, s, ranks) if budget else None
        self.packs = self.follower.packs if budget else Packs(states, index, s.pack_tokens)
        self.order = self.follower.order if budget else PackOrder(self.packs, s.seed)
        markers = facts["protocol"]["think_open"], facts["protocol"]["think_close"]
        self.held_out = HeldOut(self.packs, self.packs.pack_split(HELD_OUT, None), *markers)
        self.total_steps = max(1, self.order.count(s.epochs) // s.packs_per_step)
        self.steps_an_epoch = max(1, self.order.count(1) // s.packs_per_step)

    def new_draft(self, seed: int) -> Draft:
        """The draft before any training, on the CPU: initialised from the seed or from the published draft."""
        draft = Draft(self.config, self.target["embedding"])
        draft.initialise(self.target["lm_head"][self.kept].float(), seed)
        if self.published:
            self.published.fill(draft)
        return draft
