"""Does a real vLLM, serving the tiny Kimi, do what the pipeline counts on? Chats and their ids; a server killed."""

import json
import urllib.request
from pathlib import Path

from transformers import AutoTokenizer

from tests.end_to_end.checks import Checks
from tests.end_to_end.server import VllmServer, living_processes
from tests.support.kimi_vocabulary import END_THINK, IM_END, THINK

QUESTION = [{"role": "user", "content": "What does shutil.copyfile do?"}]
QUESTION_IDS_END = [163_588, 69_702, 163_601, THINK]  # <|im_assistant|>assistant<|im_middle|><think>


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
    """Reasoning and content, exact token ids, thinking budget, a cut reply, instant mode, the end token."""
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
    """kill() ends every process of the server: what later steps do to a server rests on it."""
    group = server.pid
    workers = len(living_processes(group)) - 1
    server.kill()
    left = living_processes(group)
    check("kill() ends the server and its workers", workers > 0 and not left, f"{workers} workers, {len(left)} left")
