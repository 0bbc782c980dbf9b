"""Does a real vLLM do, with the tiny Kimi, what the pipeline counts on? Prints ok or FAILED; exits 1 on a failure.

    python -m tests.end_to_end.check_engine --work FOLDER [--train-steps 200] [--tensor-parallel 1 2]

One server answers chats (reasoning, exact token ids, thinking budget, instant mode) and is killed; one server for each
tensor-parallel size extracts hidden states, which are compared with transformers' own. About a minute a server on two
cores.
"""

import argparse
import fcntl
import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer, Kimi_K25ForConditionalGeneration

from tests.end_to_end.server import VllmServer, living_processes
from tests.end_to_end.tiny_kimi import build_checkpoint

THINK, END_THINK, IM_END = 163_606, 163_607, 163_586
LAYER_IDS = [1, 3, 5, 6]  # as vLLM counts: k is the input of layer k; 6, the number of layers, is before the final norm
SAME, OTHER = 0.02, 0.1  # relative distances: equal up to bf16 rounding, clearly another layer's
PROMPT_TOKENS = [1, 15, 16, 17, 64, 300]  # around the cache's block of 16, and several blocks
WRITE_DELAY_S = 0.5
QUESTION = [{"role": "user", "content": "What does shutil.copyfile do?"}]
QUESTION_IDS_END = [163_588, 69_702, 163_601, THINK]  # <|im_assistant|>assistant<|im_middle|><think>


class Checks:
    """Counts what holds and what failed; a failed check says what it saw and the rest goes on.

    `step`: whose checks these are, in front of each line, since steps print at the same time.
    """

    def __init__(self, step: str = ""):
        self.step = step
        self.passed = self.failed = 0

    def __call__(self, fact: str, holds: bool, seen: object = "") -> None:
        self.passed += bool(holds)
        self.failed += not holds
        self.say(f"{'ok    ' if holds else 'FAILED'} {fact}{'' if seen == '' else f'  [{seen}]'}")

    def say(self, line: str) -> None:
        print(f"{self.step:<17}{line}" if self.step else line, flush=True)


def post(server: VllmServer, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def chat(server: VllmServer, model: Path, **settings) -> tuple[list[int], dict]:
    """One chat completion: (prompt ids, the choice)."""
    body = {"model": str(model), "messages": QUESTION, "max_tokens": 48, "temperature": 0.7, "seed": 1}
    reply = post(server, "/v1/chat/completions", body | {"return_token_ids": True} | settings)
    return reply["prompt_token_ids"], reply["choices"][0]


def check_chat(check: Checks, server: VllmServer, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)

    prompt, choice = chat(server, model)
    message, output = choice["message"], choice["token_ids"]
    check("message.reasoning is text", bool(message.get("reasoning")), message.get("reasoning"))
    check("there is no message.reasoning_content", "reasoning_content" not in message)
    check("prompt_token_ids end in <think>", prompt[-4:] == QUESTION_IDS_END, prompt[-4:])
    rendered = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    check("prompt_token_ids are the chat template's", prompt == rendered)
    check("token_ids are in the choice, not in the message", bool(output) and "token_ids" not in message)
    check("the output does not repeat the opener", THINK not in output)

    _, choice = chat(server, model, thinking_token_budget=4, ignore_eos=True)
    output = choice["token_ids"]
    check("thinking_token_budget 4: </think> is the fifth token", output[4] == END_THINK, output[:6])
    parts = choice["message"]["reasoning"], choice["message"]["content"]
    check("reasoning is what is before it", parts[0] == tokenizer.decode(output[:4]), repr(parts[0]))
    answer = tokenizer.decode(output[5:], skip_special_tokens=True).replace("</think>", "")
    check("content is what is after it, less further </think>", (parts[1] or "") == answer, repr(answer[:60]))

    _, choice = chat(server, model, max_tokens=3)
    message = choice["message"]
    check("cut while thinking: finish_reason is length", choice["finish_reason"] == "length")
    check("cut while thinking: content is null", message["content"] is None and bool(message["reasoning"]))
    check("cut while thinking: no </think>", END_THINK not in choice["token_ids"], choice["token_ids"])

    prompt, choice = chat(server, model, chat_template_kwargs={"thinking": False})
    check("instant mode: the prompt ends in <think></think>", prompt[-2:] == [THINK, END_THINK], prompt[-2:])
    message = choice["message"]
    check("instant mode: all is content", bool(message["content"]) and not message["reasoning"], message["content"])

    _, choice = chat(server, model, logit_bias={str(IM_END): 100})
    check("<|im_end|> stops, and is among the ids", choice["token_ids"] == [IM_END], choice["token_ids"])


def check_kill(check: Checks, server: VllmServer) -> None:
    group = server.pid
    workers = len(living_processes(group)) - 1
    server.kill()
    left = living_processes(group)
    check("kill() ends the server and its workers", workers > 0 and not left, f"{workers} workers, {len(left)} left")


def extraction_flags(storage: Path, tensor_parallel: int) -> list[str]:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
    }
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "tests.end_to_end.cpu_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage), "write_delay_s": WRITE_DELAY_S},
    }
    flags = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    flags += ["--no-enable-prefix-caching", "--tensor-parallel-size", str(tensor_parallel)]
    return [*flags, "--language-model-only"]


def extract(server: VllmServer, model: Path, ids: list[int]) -> tuple[dict[str, torch.Tensor], bool, bool]:
    """One request: (the file's tensors, was the file there with the answer?, was the lock held then?)."""
    body = {"model": str(model), "prompt": ids, "max_tokens": 1}
    path = post(server, "/v1/completions", body)["kv_transfer_params"]["hidden_states_path"]
    there = os.path.exists(path)
    with open(path + ".lock") as lock:  # is there before the answer
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
            fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path), there, held


def random_prompts() -> list[list[int]]:
    """One prompt of random tokens for each of PROMPT_TOKENS."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(163_584, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]


def reference_states(model: Path, prompts: list[list[int]], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """transformers' states, the prompts end to end: [layers + 1, all T, H]; index k is the input of layer k.

    By hooks: the last entry of transformers' own `hidden_states` is taken after the final norm.
    """
    text = Kimi_K25ForConditionalGeneration.from_pretrained(model, dtype=dtype).eval().model.language_model
    states: list[torch.Tensor] = []
    text.layers[0].register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0][0]))
    for layer in text.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: states.append(output[0]))
    found = []
    for ids in prompts:
        states.clear()
        with torch.no_grad():
            text(input_ids=torch.tensor([ids]))
        found.append(torch.stack(states).float())
    return torch.cat(found, dim=1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def check_extraction(
    check: Checks, server: VllmServer, model: Path, name: str, prompts: list[list[int]], reference: torch.Tensor
) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda ids: extract(server, model, ids), prompts))
    early = all(held and not there for _, there, held in replies)
    check(f"{name}: the answer comes before the file, while the lock is held", early)
    files = [tensors for tensors, _, _ in replies]
    same_ids = all(f["token_ids"].tolist() == ids for f, ids in zip(files, prompts, strict=True))
    check(f"{name}: token_ids are the prompt's", same_ids)
    shapes = [tuple(f["hidden_states"].shape) for f in files]
    expected = [(n, len(LAYER_IDS), reference.shape[-1]) for n in PROMPT_TOKENS]
    check(f"{name}: one state a prompt token and layer id", shapes == expected, shapes)
    check(f"{name}: bfloat16", all(f["hidden_states"].dtype == torch.bfloat16 for f in files))

    states = torch.cat([f["hidden_states"].float() for f in files])  # [all T, layer ids, H]
    for column, k in enumerate(LAYER_IDS):
        found = states[:, column]
        near = {f"id {j}": distance(found, reference[j]) for j in (k - 1, k, k + 1) if j < len(reference)}
        near["next token"] = distance(found, reference[k].roll(1, dims=0))
        own = near.pop(f"id {k}")
        holds = own < SAME and min(near.values()) > OTHER
        others = ", ".join(f"{other} {d:.2f}" for other, d in near.items())
        check(f"{name}: id {k} is the input of layer {k}", holds, f"off by {own:.4f}; {others}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, the logs and the states")
    parser.add_argument("--train-steps", type=int, default=200, help="of the tiny Kimi, if it is not there yet")
    parser.add_argument("--tensor-parallel", type=int, nargs="*", default=[1, 2], help="sizes to extract with")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()  # the tiny Kimi has no vision tower: a page of warnings
    transformers.logging.disable_progress_bar()
    work = args.work.resolve()
    taught, untaught = work / "tiny-kimi", work / "tiny-kimi-random"
    for model, steps in ((taught, args.train_steps), (untaught, 0)):
        if not (model / "model.safetensors.index.json").exists():
            build_checkpoint(model, train_steps=steps)

    check = Checks()
    with VllmServer(taught, work / "chat.log", "--language-model-only", "--reasoning-parser", "kimi_k2") as server:
        check_chat(check, server, taught)
        check_kill(check, server)
    # Random weights for the comparison: in a trained model the router's choices matter, and where two experts are
    # nearly tied bfloat16's rounding decides, so that single tokens differ by half their size between right engines.
    prompts = random_prompts()
    reference = reference_states(untaught, prompts)
    for size in args.tensor_parallel:
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(size)))} if size > 1 else {}
        flags = extraction_flags(work / f"states-tp{size}", size)
        with VllmServer(untaught, work / f"extract-tp{size}.log", *flags, env=threads) as server:
            check_extraction(check, server, untaught, f"TP {size}", prompts, reference)
    print(f"{check.failed} failed" if check.failed else "all ok")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
