"""The target in this process, through transformers."""

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from common.pipeline.errors import UserError
from common.pipeline.settings import Target
from common.target.protocol import require_model


def load_model(target: Target, device: str):
    """The target in bf16 on the device (`auto`: the GPU if there is one), in evaluation mode; raises UserError."""
    require_model(target.model)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=target.revision or None,
            trust_remote_code=target.trust_remote_code,
            dtype=torch.bfloat16,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load {target.model!r}: {str(error).strip().splitlines()[0]}") from None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()
