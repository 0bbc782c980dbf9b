"""A served folder of a very small draft, in either form and with any option: what an engine would load."""

import torch

from common.dataset.draft_vocabulary import mappings
from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.export.served_folder import export

KEPT = torch.tensor([0, 3, 4, 7, 9, 11])  # the draft's vocabulary, of 12 target tokens
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
MLA = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
TEXT = {"bos_token_id": 1, "eos_token_id": 2}


def make_draft(form="llama", kept=KEPT, **options) -> tuple[Draft, torch.Tensor, torch.Tensor]:
    """(the draft, d2t, t2d); `options` are fields of DraftConfig."""
    sizes = SIZES | ({"num_key_value_heads": 2, **MLA} if form == "mla" else {}) | options
    config = DraftConfig(form=form, **sizes, vocab_size=12, draft_vocab_size=len(kept))
    draft = Draft(config, torch.randn(12, 8).bfloat16())
    draft.initialise(None, 0)
    return draft, *mappings(kept, 12)


def write(folder, layers=(2, 5, 9), embedding=True, **options):
    """Export such a draft into `folder`; returns the folder."""
    export(folder, *make_draft(**options), layers, TEXT, embedding)
    return folder
