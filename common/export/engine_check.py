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
from common.export.findings import BOTH, LEVELS, OLDER, SGLANG, VLLM, Findings
from common.export.published_draft import HEAD_NORMS, draft_form, draft_sizes, our_name, read_config, read_tensors
from common.pipeline.errors import UserError


def inspect(folder: Path, target_type: str = "") -> Findings:
    """All findings for a draft's folder. Raises UserError where it has no config.json, or one that is not JSON.

    `target_type`: the target's model_type where it is known; SGLang counts the aux layers of some targets differently.
    """
    findings = Findings()
    config = read_config(folder, findings)
    try:
        tensors = read_tensors(folder, findings)
    except UserError as error:
        findings.error(BOTH, str(error))
        return findings
    if config is None:
        return findings
    tensors = _renamed(tensors, draft_form(config), findings)
    if "fc.weight" not in tensors and (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        config["last_state_only"] = True
    aux_states = _aux_states(config, tensors, findings)
    try:
        draft = draft_sizes(config, num_aux_hidden_states=aux_states)
    except KeyError as key:
        findings.error(BOTH, f"config.json has no {key}: add it")
        return findings
    except (ValueError, TypeError) as error:
        findings.error(BOTH, f"config.json: {error}")
        return findings
    _check_shapes(config, draft, tensors, findings)
    _check_vocabulary(config, draft, tensors, findings)
    check_config(config, draft, target_type, findings)
    return findings


def print_findings(folder: Path) -> int:
    """Print one line a finding and a verdict; return the exit code: 0 where an engine would serve the draft, else 2."""
    findings = inspect(folder)
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        print(finding)
    engines = findings.servable()
    print(f"{folder}: " + (f"servable with {' and '.join(engines)}" if engines else "not servable"))
    return 0 if engines else 2


def _renamed(tensors: dict[str, Tensor], form: str, findings: Findings) -> dict[str, Tensor]:
    """The tensors under the names that both engines read."""
    if any(name.startswith("model.") for name in tensors):
        findings.error(
            VLLM, 'names begin with "model.", which vLLM adds itself: it finds no such parameter; leave it out'
        )
    if any(re.match(r"(model\.)?layers\.0\.", name) for name in tensors) and form == "llama":
        text = f'"layers.0.*" names: {OLDER["layers.0 names"]} skip them silently and accept nothing'
        findings.note(SGLANG, f'{text}; rename them to "midlayer.*"')
    return {our_name(name): tensor for name, tensor in tensors.items()}


def _aux_states(config: dict, tensors: dict[str, Tensor], findings: Findings) -> int:
    """The number of aux states that fc reads; a finding where the engines would build an fc of another width."""
    fc = tensors.get("fc.weight")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    built = config.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    width = config.get("target_hidden_size") or config.get("hidden_size")
    if fc is None or fc.ndim != 2 or not isinstance(width, int) or fc.shape[1] % width:
        return built
    count = fc.shape[1] // width
    if count != built:
        text = f"fc.weight reads {count} aux states, the engines would build {built}"
        findings.error(BOTH, f"{text}: set num_aux_hidden_states to {count}")
    elif count != 3:
        older = OLDER["fc of other than three states"]
        findings.note(SGLANG, f"fc.weight reads {count} aux states: {older} build an fc of 3 and refuse it")
    return count


def _check_shapes(config: dict, draft: DraftConfig, tensors: dict[str, Tensor], findings: Findings) -> None:
    """Compare with the parameters that the engines' modules have; missing ones stay random silently."""
    other_width = config.get("target_hidden_size") not in (None, draft.hidden_size)
    plain = replace(draft, fc_norm=False, norm_before_fc=False) if other_width else draft
    with torch.device("meta"):
        model = Draft(plain, torch.empty(draft.vocab_size, draft.hidden_size))
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config["architectures"] == [HEAD_NORMS]:
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
        if name not in tensors and name in ("embed_tokens.weight", "lm_head.weight"):
            continue  # engines may share the target's
        if quantised and "midlayer" in name:
            continue
        if name not in tensors:
            findings.error(BOTH, f"{name} is missing: engines keep random values for it and accept nothing")
        elif tuple(tensors[name].shape) != shape:
            findings.error(BOTH, f"{name} has shape {list(tensors[name].shape)}, config.json says {list(shape)}")
        elif not tensors[name].is_floating_point():
            findings.error(BOTH, f"{name} is {tensors[name].dtype}, expected a float type")
        elif not torch.isfinite(tensors[name].float()).all():
            findings.error(BOTH, f"{name} is not finite: no draft token would be accepted")
        elif name in ("lm_head.weight", "norm.weight") and not tensors[name].any():
            findings.error(BOTH, f"{name} is all zero: no draft token would be accepted")
    if "embed_tokens.weight" not in tensors and other_width:
        findings.error(BOTH, "embed_tokens.weight is missing, and the target's has another width: it stays random")
    elif "embed_tokens.weight" not in tensors:
        findings.note(BOTH, "no embed_tokens.weight: both engines take the target's")
    _check_biases(config, tensors, findings)
    layers = config.get("num_hidden_layers", 1)
    further = {int(match[1]) for match in (re.match(r"layers\.(\d+)\.", name) for name in tensors) if match}
    if set(range(1, layers)) - further:
        stored = sorted(further | {0})
        findings.error(
            BOTH, f"num_hidden_layers is {layers}, but only layers {stored} are stored: the others stay random"
        )
    known = {*wanted, "d2t", "t2d"}
    unread = [name for name in tensors if name not in known and "rotary_emb" not in name and not name.endswith(".bias")]
    unread = [name for name in unread if not ((m := re.match(r"layers\.(\d+)\.", name)) and int(m[1]) < layers)]
    if unread and not (quantised or other_width):
        names = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        findings.error(VLLM, f"{names}: vLLM has no such parameter and refuses the draft; leave it out")
        findings.note(SGLANG, f"{names}: skipped")


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
        findings.error(
            SGLANG, "tie_word_embeddings is true: SGLang would use the embedding as the head; set it to false"
        )
    if "lm_head.weight" not in tensors:
        if reduced:
            text = "vLLM takes the first rows of the target's head, SGLang keeps random values"
            findings.error(BOTH, f"lm_head.weight is missing: {text}")
        elif config.get("draft_vocab_size") is not None:
            text = "lm_head.weight is missing: it stays random"
            findings.error(SGLANG, f"{text}; set draft_vocab_size to null and SGLang takes the target's")
        else:
            findings.note(BOTH, "no lm_head.weight: both engines take the target's")
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if not reduced:
        if d2t is not None:
            findings.error(VLLM, "d2t with a full vocabulary: vLLM has no such parameter; leave d2t and t2d out")
        return
    if d2t is None:
        findings.error(BOTH, "d2t is missing: engines take draft ids for target ids and accept nothing")
        return
    if tuple(d2t.shape) != (draft.draft_vocab_size,):
        findings.error(BOTH, f"d2t has shape {list(d2t.shape)}, expected {[draft.draft_vocab_size]}")
        return
    if d2t.dtype != torch.int64:
        findings.note(BOTH, f"d2t is {d2t.dtype}: both engines convert it; int64 is usual")
    ids = torch.arange(len(d2t)) + d2t.long()
    outside = int(((ids < 0) | (ids >= draft.vocab_size)).sum())
    if outside or len(ids.unique()) < len(ids):
        what = f"{outside} target ids lie outside the vocabulary" if outside else "several draft ids mean one target id"
        absolute = bool((d2t[1:] > d2t[:-1]).all())  # offsets stay equal between neighbouring target ids, ids never do
        fix = "; it looks like absolute ids: subtract 0, 1, 2, ..." if absolute else ""
        findings.error(BOTH, f"d2t holds offsets (target id = draft id + d2t), but {what}{fix}")
    elif t2d is None:
        findings.note(BOTH, "no t2d: no engine reads it, but a warm start rebuilds it from d2t")
    elif tuple(t2d.shape) != (draft.vocab_size,) or not torch.equal(t2d.bool().nonzero().flatten(), ids):
        findings.error(BOTH, "d2t and t2d contradict each other: rows of the head may mean other tokens")
