"""A made-up target of eight numbers a state, and the vLLM extractor with settings for the tests' own server."""

from array import array
from pathlib import Path

import torch

from common.dataset.stream import Stream
from common.extraction import vllm_extractor
from common.pipeline.settings import Extract, Target
from common.target.sizes import TargetSizes
from tests.support.extraction_server import MODEL, ExtractionServer

AUX, DEPTH, HIDDEN = (1, 2, 3), 6, 8
LAYERS = [*AUX, DEPTH]
CONSTANTS = {"RETRIES": 3, "MAX_CONSECUTIVE_FAILURES": 32, "SAMPLE_TIMEOUT_S": 10.0}
SIZES = TargetSizes(HIDDEN, DEPTH, 1000, 1e-5, False, {})


def states_of(ids: list[int]) -> torch.Tensor:
    """Some states [T, layer ids, H] that tell ids, rows and layers apart."""
    generator = torch.Generator().manual_seed(sum(ids) * 31 + len(ids))
    return torch.randn(len(ids), len(LAYERS), HIDDEN, generator=generator).bfloat16()


def stream(number: int, tokens: int = 20) -> Stream:
    return Stream(f"s{number}", array("i", range(number, number + tokens)), array("B", [1] * tokens))


def extractor(*servers: ExtractionServer, spool: Path, model: str = MODEL, **settings) -> vllm_extractor.VllmExtractor:
    """`settings` in capitals are constants of the extractor's module; the fixture `server` puts them back."""
    known = {"extract_urls": tuple(server.url for server in servers), "spool": str(spool)}
    known |= {"max_tokens_per_sample": 1024, "extract_concurrency": 4}
    for name, usual in CONSTANTS.items():
        setattr(vllm_extractor, name, settings.pop(name, usual))
    return vllm_extractor.VllmExtractor(Target(model=model), Extract(**{**known, **settings}), AUX, SIZES)
