"""The commands that start the target's servers, as text to copy: for generation, for extraction, with a draft."""

import json
import shlex
from pathlib import Path

from common.pipeline.settings import Extract, Target

EXTRACTION_CONNECTOR = "ExampleHiddenStatesConnector"  # part of vLLM; on GPUs no code of ours runs in the server


def generation_command(target: Target, port: int, max_model_len: int) -> str:
    """Serve the target for stage 01b: reasoning parsed, prompts cached."""
    flags = ["--max-model-len", str(max_model_len)]
    flags += ["--reasoning-parser", target.reasoning_parser] if target.reasoning_parser else []
    return _command(target, port, flags)


def extraction_command(target: Target, settings: Extract, port: int, aux_layers: tuple[int, ...], layers: int) -> str:
    """Serve the target for stage 02: states at the inputs of `aux_layers` and after the last of `layers`.

    The development mode only opens /server_info, where 02 checks the layer list and the spool before its first request.
    """
    flags = ["--max-model-len", str(settings.max_tokens_per_sample + 1)]  # and one generated token, which is discarded
    flags += extraction_flags(settings.spool, aux_layers, layers)
    return "VLLM_SERVER_DEV_MODE=1 " + _command(target, port, flags)


def extraction_flags(spool: str, aux_layers: tuple[int, ...], layers: int, connector: dict | None = None) -> list[str]:
    """The flags that turn a vLLM server into an extraction server; `connector` replaces vLLM's own."""
    ids = [*aux_layers, layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    transfer = {
        "kv_connector": EXTRACTION_CONNECTOR,
        "kv_role": "kv_producer",
        # The connector ignores the ids. They are here because /server_info shows only this, and 02 compares them.
        "kv_connector_extra_config": {"shared_storage_path": str(Path(spool).resolve()), "layer_ids": ids},
    }
    # With prefix caching, a cached prefix would come back without its states.
    return [
        "--no-enable-prefix-caching",
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(transfer | (connector or {})),
    ]


def draft_command(target: Target, port: int, draft_folder: str, draft_tokens: int) -> str:
    """Serve the target with a trained draft in vLLM."""
    speculative = {"method": "eagle3", "model": draft_folder, "num_speculative_tokens": draft_tokens}
    flags = ["--reasoning-parser", target.reasoning_parser] if target.reasoning_parser else []
    return _command(target, port, [*flags, "--speculative-config", json.dumps(speculative)])


def sglang_command(target: Target, port: int, draft_folder: str, draft_tokens: int) -> str:
    """Serve the target with a trained draft in SGLang: a chain of `draft_tokens`, as the draft was measured."""
    words = [["python", "-m", "sglang.launch_server", "--model-path", target.model, "--port", str(port)]]
    words += [["--trust-remote-code"]] if "--trust-remote-code" in target.server_flags else []
    words += [["--tp-size", str(target.tensor_parallel)]] if target.tensor_parallel > 1 else []
    words += [["--reasoning-parser", target.reasoning_parser]] if target.reasoning_parser else []
    words += [["--speculative-algorithm", "EAGLE3"], ["--speculative-draft-model-path", draft_folder]]
    words += [["--speculative-num-steps", str(draft_tokens)], ["--speculative-eagle-topk", "1"]]
    words += [["--speculative-num-draft-tokens", str(draft_tokens + 1)]]  # SGLang counts the root of the chain, too
    return " \\\n  ".join(" ".join(map(shlex.quote, line)) for line in words)


def _command(target: Target, port: int, flags: list[str]) -> str:
    """One shell line per flag."""
    words = ["vllm", "serve", target.model, "--port", str(port)]
    words += ["--tensor-parallel-size", str(target.tensor_parallel)] if target.tensor_parallel > 1 else []
    lines = [" ".join(map(shlex.quote, words))]
    for word in [*target.server_flags, *flags]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return " \\\n  ".join(lines)
