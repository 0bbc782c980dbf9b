"""A minute of training for the tiny Kimi, so that it speaks the chat form and its samples are more than noise.

The text is at hand on every machine: the docstrings of Python's standard library, asked and answered in Kimi's form,

    <|im_user|>user<|im_middle|>What does os.path.join do?<|im_end|><|im_assistant|>assistant<|im_middle|><think>
    The question is about join in os.path. ...</think>Join two or more pathname components ...<|im_end|>

and every fourth in the instant form, whose prompt ends in <think></think>. Questions of another kind are answered with
near noise, often without a </think>: a form that a pipeline has to take as well.
"""

import ast
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

BATCH = 8  # chats a step
INSTANT_EVERY = 4
COMMON = 10  # occurrences; a chat with a rarer token is left out, since so small a model never learns rare words
CHAT_TOKENS = 96  # longer chats are left out, so that every chat that is learned has its end
PEAK_LEARNING_RATE = 4e-3
IGNORE = -100


def docstrings() -> Iterator[tuple[str, str, str]]:
    """(module, function or class, first paragraph of its docstring), over the standard library, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if {"site-packages", "test", "idlelib", "lib2to3"} & set(file.parts):
            continue
        module = ".".join(file.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield module, node.name, " ".join(text.split("\n\n")[0].split())


def chats(tokenizer) -> list[list[int]]:
    """Token ids of every chat: generation prompt, reasoning and </think> unless instant, answer, <|im_end|>."""
    every_chat = []
    for number, (module, name, answer) in enumerate(docstrings()):
        question = [{"role": "user", "content": f"What does {module}.{name} do?"}]
        thinking = number % INSTANT_EVERY != 0
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, thinking=thinking)
        reasoning = f"The question is about {name} in {module}. Its documentation says what it does, so I repeat it."
        reply = f"{reasoning}</think>{answer}" if thinking else answer
        every_chat.append(tokenizer.encode(f"{prompt}{reply}<|im_end|>"))
    counts = Counter(i for chat in every_chat for i in chat)
    return [chat for chat in every_chat if len(chat) <= CHAT_TOKENS and all(counts[i] >= COMMON for i in chat)]


def teach(model: DeepseekV3ForCausalLM, tokenizer_folder: Path, steps: int) -> None:
    """Train `model` in place, float32 on the CPU, printing the loss in nats a token.

    The text uses V' of Kimi's 163,840 tokens. Their embedding and head rows are cut out, trained and put back: the
    other nine tenths get no gradient that matters, yet softmax and optimizer would cost ten times the layers.
    """
    torch.set_num_threads(1)  # matrices this small gain nothing from a second, which spins when the machine is busy
    data = chats(AutoTokenizer.from_pretrained(tokenizer_folder))
    used = torch.tensor(sorted({i for chat in data for i in chat}))  # [V']
    rank = {int(i): k for k, i in enumerate(used)}
    embedding = model.model.embed_tokens.weight.data[used].requires_grad_()  # [V', H]
    head = model.lm_head.weight.data[used].requires_grad_()  # [V', H]
    weights = [*model.model.layers.parameters(), *model.model.norm.parameters(), embedding, head]
    optimizer = torch.optim.AdamW(weights, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=steps, pct_start=0.1)
    log_unused = torch.tensor(float(model.config.vocab_size - len(used))).log()
    rng = random.Random(0)
    print(f"teaching the tiny Kimi: {len(data)} chats, {len(used)} distinct tokens, {steps} steps of {BATCH} chats")
    for step in range(steps):
        batch = rng.sample(data, BATCH)
        length = max(map(len, batch))
        ranks = torch.tensor([[rank[i] for i in chat] + [IGNORE] * (length - len(chat)) for chat in batch])  # [B, T]
        hidden = model.model(inputs_embeds=embedding[ranks.clamp(min=0)]).last_hidden_state
        loss = next_token_loss(hidden, head, ranks, log_unused)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step:4d}  loss {loss.item():.3f}", flush=True)
    model.model.embed_tokens.weight.data[used] = embedding.data
    model.lm_head.weight.data[used] = head.data


def next_token_loss(hidden, head, ranks, log_unused) -> torch.Tensor:
    """Mean cross entropy over the whole vocabulary. hidden [B, T, H], head [V', H], ranks [B, T] into the head's rows.

    The rows outside the head keep their small random start, a logit of about 0 each: together they count in the
    denominator as one term, log(how many).
    """
    logits = F.linear(hidden[:, :-1], head)  # [B, T-1, V']
    logits = torch.cat([logits, log_unused.expand(*logits.shape[:-1], 1)], dim=-1)
    return F.cross_entropy(logits.flatten(0, 1), ranks[:, 1:].flatten(), ignore_index=IGNORE)
