"""What vLLM and SGLang would do with any EAGLE-3 folder, ours or a published one: one finding a line, per engine.

Read out of vLLM 0.32 (llama_eagle3.py, deepseek_eagle3.py, both model runners) and SGLang of 2026 (llama_eagle3.py,
kimi_k25_eagle3.py, model_runner.py). What our own exporter writes must pass the stricter `export.check_export`.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.draft.config import DraftConfig
from common.draft.network import Draft, rope_frequencies, yarn_mscale
from common.export.findings import BOTH, SGLANG, VLLM, Findings
from common.export.published_draft import (
    FORMS,
    HEAD_NORMS,
    draft_sizes,
    our_name,
    read_config,
    read_weights,
    weight_files,
)
from common.export.served_folder import ARCHITECTURES
from common.pipeline.errors import UserError

OLD_SGLANG = "SGLang before 2026"
EAGLE_31 = "June 2026"  # when engines learned fc_norm and norm_output: vLLM #42764, SGLang #24663 and #26506
OLD_RUNNER = "vLLM's older runner (VLLM_USE_V2_MODEL_RUNNER=0, or on a CPU)"


def inspect(folder: Path) -> Findings:
    """Everything that is to be said about a folder; raises UserError where there is none or its config is no JSON."""
    found = Findings()
    config = read_config(folder, found)
    tensors = _read_tensors(folder, found)
    if not tensors or config is None:
        return found
    name = config["architectures"][0]
    form, engines = FORMS[name]
    if SGLANG not in engines and "speculators" not in config:
        fix = ", and none there has its norms" if name == HEAD_NORMS else f'; rename it to "{ARCHITECTURES[form]}"'
        found.error(SGLANG, f'the architecture "{name}" is no draft there{fix}')
    if form == "mla" and config.get("model_type") == "deepseek_v3":
        found.error(VLLM, 'model_type "deepseek_v3" is taken for the target\'s own MTP layer; rename it to "kimi_k2"')
    tensors = _renamed(tensors, form, found)
    count = _aux_count(config, tensors, found)
    try:
        draft = draft_sizes(config, num_aux_hidden_states=count)
    except (KeyError, ValueError, TypeError) as error:
        found.error(BOTH, f"config.json: {error!r}")
        return found
    _check_shapes(config, draft, tensors, found)
    _check_vocabulary(config, draft, tensors, found)
    _check_layers(config, count, found)
    _check_options(config, draft, found)
    return found


def _read_tensors(folder: Path, found: Findings) -> dict[str, Tensor]:
    """Every tensor of the folder's weights."""
    files = weight_files(folder)
    if not files:
        found.error(BOTH, f"no *.safetensors and no *.bin in {folder}")
    elif files[0].suffix == ".bin":
        found.note(BOTH, f"{files[0].name} is a pickle, which can carry code: safetensors is safer")
    try:
        return {name: tensor for file in files for name, tensor in read_weights(file).items()}
    except UserError as error:
        found.error(BOTH, str(error))
        return {}


def _renamed(tensors: dict[str, Tensor], form: str, found: Findings) -> dict[str, Tensor]:
    """Tensors under the names that both engines read."""
    if any(name.startswith("model.") for name in tensors):
        found.error(VLLM, 'names begin with "model.": vLLM puts its own before them and finds no such parameter')
    if any(re.match(r"(model\.)?layers\.0\.", name) for name in tensors) and form == "llama":
        found.note(
            SGLANG, f'"layers.0.*" names: {OLD_SGLANG} skips them silently and accepts nothing; use "midlayer.*"'
        )
    return {our_name(name): tensor for name, tensor in tensors.items()}


def _aux_count(config: dict, tensors: dict[str, Tensor], found: Findings) -> int:
    """How many aux states fc reads; what each engine would build is compared with it."""
    fc = tensors.get("fc.weight")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    built = config.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    width = config.get("target_hidden_size") or config.get("hidden_size")
    if fc is None or fc.ndim != 2 or not isinstance(width, int) or fc.shape[1] % width:
        return built
    count = fc.shape[1] // width
    if count != built:
        found.error(BOTH, f"fc reads {count} aux states, the engines would build {built}: set num_aux_hidden_states")
    elif count != 3:
        found.note(SGLANG, f"{count} aux states: {OLD_SGLANG} builds an fc of 3 and refuses")
    return count


def _check_shapes(config: dict, draft: DraftConfig, tensors: dict[str, Tensor], found: Findings) -> None:
    """Every tensor that the engines' modules have: those that are missing stay random without a word."""
    own_input = config.get("target_hidden_size") not in (None, draft.hidden_size)
    plain = replace(draft, fc_norm=False, norm_before_fc=False) if own_input else draft
    with torch.device("meta"):
        model = Draft(plain, torch.empty(draft.vocab_size, draft.hidden_size))
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if config["architectures"] == [HEAD_NORMS]:
        wanted |= {f"midlayer.self_attn.{name}.weight": (draft.head_dim,) for name in ("q_norm", "k_norm")}
    if own_input:
        wanted["fc.weight"] = (draft.hidden_size, draft.num_aux * config["target_hidden_size"])
        found.note(BOTH, "target_hidden_size is not the draft's own: norms before fc are not checked")
    quantised = config.get("quantization_config")
    if quantised:
        found.note(BOTH, "quantised weights: shapes and values of the layer are not checked")
    for name, shape in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            if name not in ("embed_tokens.weight", "lm_head.weight") and not (quantised and "midlayer" in name):
                found.error(BOTH, f"{name} is missing: it stays random, without a word, and nothing is accepted")
        elif quantised and "midlayer" in name:
            continue
        elif tuple(tensor.shape) != shape:
            found.error(BOTH, f"{name} has shape {list(tensor.shape)}, config.json says {list(shape)}: refused")
        elif not tensor.is_floating_point():
            found.error(BOTH, f"{name} is {tensor.dtype}, expected a float type")
        elif not torch.isfinite(tensor.float()).all():
            found.error(BOTH, f"{name} is not finite: nothing would be accepted")
    if "embed_tokens.weight" not in tensors and own_input:
        found.error(BOTH, "no embed_tokens.weight: it stays random, as the target's has another width")
    elif "embed_tokens.weight" not in tensors:
        found.note(BOTH, "no embed_tokens.weight: both take the target's")
    layers = config.get("num_hidden_layers", 1)
    further = {int(m[1]) for m in (re.match(r"layers\.(\d+)\.", name) for name in tensors) if m}
    if set(range(1, layers)) - further:
        found.error(
            BOTH, f"num_hidden_layers is {layers}, but layers {sorted(further | {0})} are there: random weights"
        )
    known = {*wanted, "d2t", "t2d"}
    odd = [name for name in tensors if name not in known and not re.match(r"layers\.\d+\.", name)]
    odd = [name for name in odd if not name.endswith(".bias") and "rotary_emb" not in name]
    if odd and not (quantised or own_input):
        found.error(VLLM, f"{_some(odd)}: no such parameter, refused")
        found.note(SGLANG, f"{_some(odd)}: skipped")


def _check_vocabulary(config: dict, draft: DraftConfig, tensors: dict[str, Tensor], found: Findings) -> None:
    reduced = draft.draft_vocab_size < draft.vocab_size
    if "lm_head.weight" not in tensors:
        if reduced:
            found.error(BOTH, "no lm_head.weight: vLLM cuts the target's to the first rows, SGLang keeps a random one")
        elif config.get("draft_vocab_size") is not None:
            found.error(SGLANG, "no lm_head.weight: it stays random; set draft_vocab_size null to take the target's")
        else:
            found.note(BOTH, "no lm_head.weight: the target's is taken")
    if "draft_vocab_size" not in config:
        found.error(SGLANG, "no draft_vocab_size: SGLang reads it without a default")
    if config.get("tie_word_embeddings"):
        found.error(SGLANG, "tie_word_embeddings is true: the embedding would be the head")
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if reduced:
            found.error(BOTH, "no d2t: draft ids would be taken for target ids, without a word; nothing is accepted")
        return
    if not reduced:
        found.error(VLLM, "d2t with a full vocabulary: no such parameter, refused; leave d2t and t2d out")
        return
    if tuple(d2t.shape) != (draft.draft_vocab_size,):
        found.error(BOTH, f"d2t has shape {list(d2t.shape)}, expected {[draft.draft_vocab_size]}")
        return
    if d2t.dtype != torch.int64:
        found.note(BOTH, f"d2t is {d2t.dtype}; int64 is usual")
    kept = torch.arange(len(d2t)) + d2t.long()
    outside = int(((kept < 0) | (kept >= draft.vocab_size)).sum())
    if outside or len(kept.unique()) < len(kept):
        what = f"{outside} target ids outside the vocabulary" if outside else "one target id for several draft ids"
        absolute = bool((d2t[1:] > d2t[:-1]).all())  # offsets only grow where tokens are left out between
        found.error(BOTH, f"d2t is an offset (target id = draft id + d2t): {what}" + "; it looks absolute" * absolute)
    elif t2d is None:
        found.note(BOTH, "no t2d: neither engine reads it, but training on does")
    elif tuple(t2d.shape) != (draft.vocab_size,) or not torch.equal(t2d.bool().nonzero().flatten(), kept.sort().values):
        found.error(BOTH, "d2t and t2d contradict each other: the head's rows may mean other tokens")


def _check_layers(config: dict, count: int, found: Findings) -> None:
    """Which target layers each engine reads: vLLM counts inputs, SGLang outputs (one less for the same state).

    vLLM has two runners. The one that is usual on GPUs reads the top-level list only, else the default, 2, N//2, N-3;
    the older one reads eagle_config's in between, as inputs.
    """
    top = config.get("eagle_aux_hidden_state_layer_ids")
    eagle = config.get("eagle_config") or {}
    nested = eagle.get("eagle_aux_hidden_state_layer_ids")
    for ids, where in ((top, "eagle_aux_hidden_state_layer_ids"), (nested, "eagle_config's list")):
        if ids and len(ids) != count:
            found.error(BOTH, f"{where} names {len(ids)} layers for an fc of {count} states")
    if eagle.get("use_aux_hidden_state") is False:
        found.error(BOTH, "eagle_config.use_aux_hidden_state is false: the last state would be fed, not fc's")
    if top and nested:
        if [i - 1 for i in top] == list(nested):
            found.note(BOTH, f"aux layers: inputs of {list(top)}, for both engines")
        else:
            text = f"eagle_config's {list(nested)} are the inputs of {[i + 1 for i in nested]}, vLLM reads {list(top)}"
            found.error(SGLANG, f"{text}: one of the two engines is wrong")
    elif top and not config.get("speculators"):
        if _is_default(top):
            found.note(
                SGLANG, f"no eagle_config: its default, 2, N//2, N-3, is vLLM's {list(top)} with {top[2] + 3} layers"
            )
        else:
            found.error(SGLANG, f"no eagle_config: its default, 2, N//2, N-3, would be read and not {list(top)}")
    elif nested:
        shifted = [i + 1 for i in nested]
        if _is_default(shifted):
            text = f"{OLD_RUNNER} reads eagle_config's {list(nested)} as inputs, a layer too early"
            found.note(VLLM, f"{text}: put eagle_aux_hidden_state_layer_ids {shifted} at the top level")
        elif _is_default(nested):
            found.error(SGLANG, f"reads eagle_config's {list(nested)} as outputs, a layer too late, if vLLM is right")
        else:
            text = f"eagle_config's {list(nested)} is not read: the default, 2, N//2, N-3, is, without a word"
            found.error(VLLM, f"{text}; put the ids at the top level, {shifted} if these are SGLang's count")
    elif not top:
        found.note(BOTH, "no aux layer ids: both engines take their default, 2, N//2, N-3")


def _is_default(ids) -> bool:
    """Whether these are 2, N//2, N-3 of some N."""
    return len(ids) == 3 and list(ids) == [2, (ids[2] + 3) // 2, ids[2]]


def _check_options(config: dict, draft: DraftConfig, found: Findings) -> None:
    for name in ("norm_before_residual", "norm_before_fc"):
        if getattr(draft, name) and not config.get("speculators"):
            found.error(SGLANG, f"{name} is not read there: the draft would compute something else, without a word")
    for name in ("fc_norm", "norm_output"):
        if getattr(draft, name):
            found.note(BOTH, f"{name}: engines from before {EAGLE_31} do not know it")
    rope = config.get("rope_parameters") or {}
    if rope and "rope_theta" not in config and rope.get("rope_theta", 10000.0) != 10000.0:
        text = f"only rope_parameters: under transformers 4 the theta would be 10000, not {rope['rope_theta']:g}"
        found.note(BOTH, f"{text}; write rope_theta and rope_scaling too")
    if draft.form == "llama" and draft.rope_type == "yarn":
        _check_yarn(draft, found)
    if draft.form == "mla" and not draft.q_lora_rank:
        found.error(SGLANG, "no q_lora_rank: its MLA draft needs one")
        if config.get("q_lora_rank") is not None:
            found.error(VLLM, "q_lora_rank is 0, which is taken for a rank: write null")


def _check_yarn(draft: DraftConfig, found: Findings) -> None:
    """The factor on cos and sin. SGLang knows no attention_factor, and mscale only in its later versions."""
    factor, scaling = rope_frequencies(draft, draft.head_dim)[1], draft.rope_scaling
    plain = yarn_mscale(scaling["factor"])
    later = plain
    if None not in (numbers := [scaling.get(key) for key in ("mscale", "mscale_all_dim")]):
        later = yarn_mscale(scaling["factor"], numbers[0]) / yarn_mscale(scaling["factor"], numbers[1])
    for there in (scaling.get("attn_factor", 1.0) * made for made in (plain, later)):
        if not math.isclose(there, factor, rel_tol=1e-3):
            text = (
                f"yarn turns by cos and sin times {there:.4g} in some versions, in vLLM times {factor:.4g}: in place of"
            )
            fix = f"mscale, write attention_factor {factor:g} and attn_factor {factor / plain:g} in rope_scaling"
            found.error(SGLANG, f"{text} {fix}")
            return


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def print_findings(folder: Path) -> int:
    """One line a finding and a verdict; the exit code: 0 where an engine would serve the draft, else 2."""
    found = inspect(folder)
    for finding in sorted(found, key=lambda f: f.level):
        print(finding)
    engines = found.servable()
    print(f"{folder}: " + (f"servable with {' and '.join(engines)}" if engines else "not servable"))
    return 0 if engines else 2
