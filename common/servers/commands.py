"""The commands that start the target's servers, as text to copy: for generation, for extraction, with a draft."""

import json
import shlex
from pathlib import Path

from common.pipeline.settings import Extract, Target


def generation_command(target: Target, port: int, max_model_len: int) -> str:
    """Serve the target in vLLM for stage 01b: the server parses the reasoning and caches prompts."""
    return _vllm(target, port, "--max-model-len", max_model_len, *_reasoning_parser(target))


def extraction_command(target: Target, settings: Extract, port: int, aux_layers: tuple[int, ...], layers: int) -> str:
    """Serve the target in vLLM for stage 02: states at the inputs of `aux_layers` and after the last of `layers`.

    The development mode only opens /server_info, where 02 checks the layer list and the spool before its first request.
    """
    ids = [*aux_layers, layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",  # part of vLLM; on GPUs the server runs no code of ours
        "kv_role": "kv_producer",
        # The connector ignores layer_ids. They are repeated because /server_info shows only these settings.
        "kv_connector_extra_config": {"shared_storage_path": str(Path(settings.spool).resolve()), "layer_ids": ids},
    }
    flags = ["--max-model-len", settings.max_tokens_per_sample + 1]  # one token is generated, and discarded
    flags += ["--no-enable-prefix-caching"]  # vLLM returns no states for a cached prefix
    flags += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    return "VLLM_SERVER_DEV_MODE=1 " + _vllm(target, port, *flags)


def draft_command(target: Target, port: int, draft_folder: str, draft_tokens: int) -> str:
    """Serve the target with a trained draft in vLLM."""
    speculative = {"method": "eagle3", "model": draft_folder, "num_speculative_tokens": draft_tokens}
    return _vllm(target, port, *_reasoning_parser(target), "--speculative-config", json.dumps(speculative))


def sglang_command(target: Target, port: int, draft_folder: str, draft_tokens: int) -> str:
    """Serve the target with a trained draft in SGLang: a chain of `draft_tokens`, as the draft was measured."""
    flags = ["--trust-remote-code"] if "--trust-remote-code" in target.server_flags else []
    flags += ["--tp-size", target.tensor_parallel] if target.tensor_parallel > 1 else []
    flags += [*_reasoning_parser(target), "--speculative-algorithm", "EAGLE3"]
    flags += ["--speculative-draft-model-path", draft_folder, "--speculative-num-steps", draft_tokens]
    flags += ["--speculative-eagle-topk", 1]
    flags += ["--speculative-num-draft-tokens", draft_tokens + 1]  # SGLang also counts the root of the chain
    return _shell(f"python -m sglang.launch_server --model-path {shlex.quote(target.model)} --port {port}", *flags)


def _reasoning_parser(target: Target) -> list[str]:
    return ["--reasoning-parser", target.reasoning_parser] if target.reasoning_parser else []


def _vllm(target: Target, port: int, *flags: str | int) -> str:
    parallel = f" --tensor-parallel-size {target.tensor_parallel}" if target.tensor_parallel > 1 else ""
    return _shell(f"vllm serve {shlex.quote(target.model)} --port {port}{parallel}", *target.server_flags, *flags)


def _shell(command: str, *flags: str | int) -> str:
    """The command with each further flag on a line of its own."""
    words = [shlex.quote(str(word)) for word in flags]
    return command + "".join((" \\\n  " if word.startswith("--") else " ") + word for word in words)
