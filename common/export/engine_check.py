"""Check any EAGLE-3 folder, ours or a published one: what vLLM and SGLang would do with it, one finding a line.

Engines load a draft that lacks `fc`, `d2t` or `lm_head` without a message and then accept nothing, so names, shapes,
dtypes and values are all compared here with what the engines' modules have. Our own export is published only when
this check finds no fault. `findings.CHECKED` says which engine versions were read.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.draft.config import DraftConfig
from common.draft.network import Draft
from common.export.config_check import check_config
from common.export.findings import BOTH, LEVELS, SGLANG, SOME_SGLANG, VLLM, Findings
from common.export.published_draft import HEAD_NORMS, engine_names, read_config, read_tensors, tensor_fault
from common.export.served_config import LAYER_IDS, read_draft_config
from common.pipeline.errors import UserError
from common.pipeline.files import read_json

LAYER = re.compile(r"layers\.(\d+)\.")


def inspect(folder: Path, target_type: str = "") -> Findings:
    """All findings for a draft's folder. Raises UserError where it has no config.json, or one that is not JSON.

    `target_type`: the target's model_type where it is known; SGLang counts the aux layers of some targets differently.
    """
    findings, values = Findings(), read_json(folder / "config.json")
    try:
        config = read_config(values, findings)
        draft = read_draft_config(config)
        stored = read_tensors(folder, findings)
    except (UserError, ValueError, TypeError) as error:
        findings.error(BOTH, str(error))
        return findings
    tensors = engine_names(stored)
    if "fc.weight" not in tensors and config["eagle_config"].get("use_aux_hidden_state") is False:
        config["last_state_only"] = True
    draft = replace(draft, num_aux=_aux_states(config, draft, tensors.get("fc.weight"), findings))
    _check_names(draft, stored, findings)
    _check_shapes(config, draft, tensors, findings)
    _check_vocabulary(config, draft, tensors, findings)
    check_config(config, draft, target_type, findings)
    return findings


def print_findings(folder: Path) -> int:
    """Print one line a finding and a verdict; return the exit code: 0 where an engine would serve the draft, else 2."""
    findings = inspect(folder)
    print(*sorted(findings, key=lambda finding: LEVELS.index(finding.level)), sep="\n")
    engines = findings.servable()
    print(f"{folder}: " + (f"servable with {' and '.join(engines)}" if engines else "not servable"))
    return 0 if engines else 2


def _check_names(draft: DraftConfig, stored: dict[str, Tensor], findings: Findings) -> None:
    if any(name.startswith("model.") for name in stored):
        text = 'names begin with "model.", which vLLM adds itself: it finds no such parameter'
        findings.error(VLLM, f'{text}; leave "model." out')
    if draft.form == "llama" and any(name.removeprefix("model.").startswith("layers.0.") for name in stored):
        text = f'"layers.0.*" names: {SOME_SGLANG} skip them silently and accept nothing'
        findings.note(SGLANG, f'{text}; rename them to "midlayer.*"')


def _aux_states(config: dict, draft: DraftConfig, fc: Tensor | None, findings: Findings) -> int:
    """The number of aux states that fc reads; a finding where the engines would build an fc of another width."""
    built = config.get("num_aux_hidden_states") or len(config["eagle_config"].get(LAYER_IDS) or (1, 2, 3))
    width = config.get("target_hidden_size") or draft.hidden_size
    if fc is None or fc.ndim != 2 or fc.shape[1] % width:
        return built
    count = fc.shape[1] // width
    if count != built:
        text = f"fc.weight reads {count} aux states, the engines would build {built}"
        findings.error(BOTH, f"{text}: set num_aux_hidden_states to {count}")
    elif count != 3:
        findings.note(SGLANG, f"fc.weight reads {count} aux states: {SOME_SGLANG} build an fc of 3 and refuse it")
    return count


def _check_shapes(config: dict, draft: DraftConfig, tensors: dict[str, Tensor], findings: Findings) -> None:
    """Compare with the parameters that the engines' modules have; missing ones stay random silently."""
    other_width = config.get("target_hidden_size") not in (None, draft.hidden_size)
    plain = replace(draft, fc_norm=False, norm_before_fc=False) if other_width else draft
    with torch.device("meta"):
        model = Draft(plain, torch.empty(draft.vocab_size, draft.hidden_size))
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    if config["architecture"] == HEAD_NORMS:
        wanted |= {f"midlayer.self_attn.{name}.weight": (draft.head_dim,) for name in ("q_norm", "k_norm")}
    if other_width:
        wanted["fc.weight"] = (draft.hidden_size, draft.num_aux * config["target_hidden_size"])
        findings.note(BOTH, "target_hidden_size differs from hidden_size: norms before fc are not checked")
    if config.get("last_state_only"):
        del wanted["fc.weight"]
    quantised = bool(config.get("quantization_config"))
    if quantised:
        findings.note(BOTH, "quantised weights: shapes and values of the decoder layer are not checked")
    for name, shape in wanted.items():
        tensor = tensors.get(name)
        if quantised and "midlayer" in name:
            continue
        if tensor is None and name in ("embed_tokens.weight", "lm_head.weight"):
            continue  # engines may share the target's
        if fault := tensor_fault(tensor, shape):
            findings.error(BOTH, f"{name} {fault}")
        elif name in ("lm_head.weight", "norm.weight") and not tensor.any():
            findings.error(BOTH, f"{name} is all zero: no draft token would be accepted")
    if "embed_tokens.weight" not in tensors and other_width:
        findings.error(BOTH, "embed_tokens.weight is missing, and the target's has another width: it stays random")
    elif "embed_tokens.weight" not in tensors:
        findings.note(BOTH, "no embed_tokens.weight: both engines take the target's")
    _check_biases(config, tensors, findings)
    layers = config.get("num_hidden_layers", 1)
    layer_of = {name: int(match[1]) for name in tensors if (match := LAYER.match(name))}
    if set(range(1, layers)) - set(layer_of.values()):
        text = f"num_hidden_layers is {layers}, but only layers {sorted({0, *layer_of.values()})} are stored"
        findings.error(BOTH, f"{text}: the others stay random")
    read = {*wanted, "d2t", "t2d", *(name for name, layer in layer_of.items() if layer < layers)}
    unread = [name for name in tensors if name not in read and "rotary_emb" not in name and not name.endswith(".bias")]
    if unread and not (quantised or other_width):
        names = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        findings.error(VLLM, f"{names}: vLLM has no such parameter and refuses the draft; leave it out")
        findings.note(SGLANG, f"{names}: SGLang skips tensors that it does not know")


def _check_biases(config: dict, tensors: dict[str, Tensor], findings: Findings) -> None:
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    for option, modules in (("attention_bias", attention), ("mlp_bias", mlp)):
        biases = [name for name in tensors if name.endswith(tuple(f"{module}.bias" for module in modules))]
        if config.get(option) and not biases:
            findings.error(BOTH, f"{option} is true, but no bias is stored: it stays random; set {option} to false")
        elif biases and not config.get(option):
            text = f"{biases[0]} without {option}: vLLM refuses the draft, SGLang skips the bias silently"
            findings.error(BOTH, f"{text}; set {option} to true")
    if "fc.bias" in tensors:
        findings.error(BOTH, "fc.bias: the engines' fc has no bias; vLLM refuses the draft, SGLang skips it silently")


def _check_vocabulary(config: dict, draft: DraftConfig, tensors: dict[str, Tensor], findings: Findings) -> None:
    """The head and the mapping from draft ids to target ids (d2t int64 [D]: target id = draft id + d2t[draft id])."""
    reduced = draft.draft_vocab_size < draft.vocab_size
    if "draft_vocab_size" not in config:
        findings.error(SGLANG, "draft_vocab_size is missing: SGLang reads it without a default; add it")
    if config.get("tie_word_embeddings"):
        text = "tie_word_embeddings is true: SGLang would use the embedding as the head"
        findings.error(SGLANG, f"{text}; set tie_word_embeddings to false")
    if "lm_head.weight" not in tensors:
        if reduced:
            text = "lm_head.weight is missing: vLLM takes the first rows of the target's head"
            findings.error(BOTH, f"{text}, SGLang keeps random values")
        elif config.get("draft_vocab_size") is not None:
            text = "lm_head.weight is missing: it stays random"
            findings.error(SGLANG, f"{text}; set draft_vocab_size to null and SGLang takes the target's")
        else:
            findings.note(BOTH, "no lm_head.weight: both engines take the target's")
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if not reduced:
        if d2t is not None:
            findings.error(VLLM, "d2t with a full vocabulary: vLLM has no such parameter; leave d2t and t2d out")
    elif d2t is None:
        findings.error(BOTH, "d2t is missing: engines take draft ids for target ids and accept nothing")
    elif tuple(d2t.shape) != (draft.draft_vocab_size,):
        findings.error(BOTH, f"d2t has shape {list(d2t.shape)}, expected {[draft.draft_vocab_size]}")
    else:
        _check_mapping(d2t, t2d, draft.vocab_size, findings)


def _check_mapping(d2t: Tensor, t2d: Tensor | None, vocab_size: int, findings: Findings) -> None:
    if d2t.dtype != torch.int64:
        findings.note(BOTH, f"d2t is {d2t.dtype}: both engines convert it; int64 is usual")
    ids = torch.arange(len(d2t)) + d2t.long()
    outside = int(((ids < 0) | (ids >= vocab_size)).sum())
    if outside or len(ids.unique()) < len(ids):
        what = f"{outside} target ids lie outside the vocabulary" if outside else "several draft ids mean one target id"
        absolute = bool((d2t[1:] > d2t[:-1]).all())  # offsets stay equal between neighbouring target ids, ids never do
        fix = "; it looks like absolute ids: subtract 0, 1, 2, ..." if absolute else ""
        findings.error(BOTH, f"d2t holds offsets (target id = draft id + d2t), but {what}{fix}")
    elif t2d is None:
        findings.note(BOTH, "no t2d: no engine reads it, but a warm start rebuilds it from d2t")
    elif tuple(t2d.shape) != (vocab_size,) or not torch.equal(t2d.bool().nonzero().flatten(), ids):
        findings.error(BOTH, "d2t and t2d contradict each other: rows of the head may mean other tokens")
