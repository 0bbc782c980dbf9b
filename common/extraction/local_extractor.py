"""The local extractor: transformers in process, batches of similar length, hooks at the layers' inputs.

aux state k is the residual stream at the input of layer k (vLLM's id k, HF's `hidden_states[k]`). The last state is
what enters the final norm; `hidden_states[N]` of HF is behind that norm and would be wrong.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from common.dataset.shards import States
from common.dataset.stream import Stream
from common.extraction.extractor import ExtractError, Extractor
from common.pipeline.errors import UserError
from common.pipeline.settings import Extract, Target
from common.target.local_model import load_model

SORTED_BATCHES = 16  # streams of about this many batches are sorted by length together
TYPICAL_TOKENS = 512  # of a stream


class LocalExtractor(Extractor):
    """States from the target in this process. It needs no probe: the model was loaded from the config's own files."""

    def __init__(self, target: Target, settings: Extract, aux_layers: tuple[int, ...], device: str = "auto"):
        self.model = load_model(target, device)
        decoder = self.model.get_decoder()
        self.decoder = getattr(decoder, "language_model", decoder)  # a vision wrapper's text model
        if not isinstance(getattr(self.decoder, "layers", None), nn.ModuleList) or not hasattr(self.decoder, "norm"):
            raise UserError(f"{target.model!r}: no .layers and .norm in its decoder; use --extractor vllm")
        self.aux_layers, self.batch_tokens = aux_layers, settings.batch_tokens
        self.device = self.model.device
        self.description = f"transformers in process on {self.device}, batches of {self.batch_tokens} tokens"

    def states(self, streams: Iterable[Stream]) -> Iterator[tuple[Stream, States | ExtractError]]:
        """States of each stream; groups of streams are sorted by length so that batches waste little padding."""
        streams = iter(streams)
        group_size = max(1, SORTED_BATCHES * self.batch_tokens // TYPICAL_TOKENS)
        while group := sorted(islice(streams, group_size), key=len):
            while group:
                size = max(1, self.batch_tokens // len(group[-1]))  # with padding to the longest
                batch, group = group[-size:], group[:-size]
                yield from zip(batch, self._forward(batch), strict=True)

    @torch.inference_mode()
    def _forward(self, batch: list[Stream]) -> list[States]:
        """One forward: padding is on the right, where causal attention never reads it, so no mask is needed."""
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, stream in zip(ids, batch, strict=True):
            row[: len(stream)] = torch.frombuffer(stream.ids, dtype=torch.int32)
        inputs: dict[int | str, Tensor] = {}
        hooks = [
            self.decoder.layers[k].register_forward_pre_hook(_keep_input(inputs, k), with_kwargs=True)
            for k in self.aux_layers
        ]
        hooks.append(self.decoder.norm.register_forward_pre_hook(_keep_input(inputs, "last"), with_kwargs=True))
        try:
            self.decoder(input_ids=ids.to(self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        aux = torch.cat([inputs[k].to(torch.bfloat16).cpu() for k in self.aux_layers], dim=-1)
        last = inputs["last"].to(torch.bfloat16).cpu()
        return [States(aux[i, : len(s)], last[i, : len(s)]) for i, s in enumerate(batch)]


def _keep_input(inputs: dict, key: int | str):
    def hook(module, args, kwargs):
        inputs[key] = args[0] if args else kwargs["hidden_states"]

    return hook
