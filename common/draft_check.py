"""What vLLM and SGLang would do with any EAGLE-3 folder, ours or a published one: one finding a line, per engine.

Read out of vLLM 0.32 (llama_eagle3.py, deepseek_eagle3.py, gpu_model_runner.py) and SGLang of 2026 (llama_eagle3.py,
kimi_k25_eagle3.py, model_runner.py). What our own exporter writes must pass the stricter `export.check_export`.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.draft import Draft, DraftConfig
from common.errors import UserError
from common.export import read_draft_config
from common.findings import BOTH, ENGINES, SGLANG, VLLM, Findings
from common.storage import read_json

FORMS = {  # architecture -> (our form, the engines that know the name)
    "LlamaForCausalLMEagle3": ("llama", ENGINES),
    "Eagle3LlamaForCausalLM": ("llama", (VLLM,)),
    "LlamaForCausalLM": ("llama", (VLLM,)),  # vLLM puts "Eagle3" before it
    "Eagle3DeepseekV2ForCausalLM": ("mla", ENGINES),
    "Eagle3DeepseekV3ForCausalLM": ("mla", ENGINES),
}
SPECULATORS_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
SPECULATORS_KEYS += ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ARCHITECTURE_OF = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}  # LlamaConfig's
OLD_SGLANG = "SGLang before 2026"


def inspect(folder: Path) -> Findings:
    """Everything that is to be said about a folder; raises UserError where there is none or its config is no JSON."""
    found, config = Findings(), read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} must be a JSON object")
    for name, default in DEFAULTS.items():
        if name not in config and "transformer_layer_config" not in config:
            found.note(BOTH, f"no {name}: transformers' default is taken, {default:g}")
    tensors = _read_tensors(folder, found)
    if "speculators_model_type" in config:
        config = _from_speculators(config, found)
    if not tensors or config is None:
        return found
    config = DEFAULTS | config
    names = config.get("architectures") or []
    form, engines = FORMS.get(names[0] if len(names) == 1 else "", (None, ()))
    if form is None:
        found.error(BOTH, f"architectures is {names}: no EAGLE-3 draft that is known here ({', '.join(FORMS)})")
        return found
    if VLLM in engines and SGLANG not in engines and "speculators" not in config:
        found.error(SGLANG, f'the architecture "{names[0]}" is no draft there; rename it to "{ARCHITECTURE_OF[form]}"')
    if form == "mla" and config.get("model_type") == "deepseek_v3":
        found.error(VLLM, 'model_type "deepseek_v3" is taken for the target\'s own MTP layer; rename it to "kimi_k2"')
    tensors = _renamed(tensors, form, found)
    count = _aux_count(config, tensors, found)
    try:
        draft = read_draft_config(config | {"architectures": [ARCHITECTURE_OF[form]], "num_aux_hidden_states": count})
    except (KeyError, ValueError, TypeError) as error:
        found.error(BOTH, f"config.json: {error!r}")
        return found
    _check_shapes(config, draft, tensors, found)
    _check_vocabulary(config, draft, tensors, found)
    _check_layers(config, count, found)
    _check_options(config, draft, tensors, found)
    return found


def _read_tensors(folder: Path, found: Findings) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors; pickled weights are never opened."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = ", ".join(path.name for path in sorted(folder.glob("*.bin")))
        more = f"; {pickled} is a pickle, which is not opened here: convert it" if pickled else ""
        found.error(BOTH, f"no *.safetensors in {folder}{more}")
    tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError) as error:
            found.error(BOTH, f"{path.name} cannot be read: {error}")
            return {}
    return tensors


def _from_speculators(config: dict, found: Findings) -> dict | None:
    """The flat config that vLLM makes of a speculators one."""
    layer = config.get("transformer_layer_config")
    if config["speculators_model_type"] != "eagle3" or not isinstance(layer, dict):
        found.error(BOTH, f"speculators format of {config['speculators_model_type']!r}, not of eagle3 with its layer")
        return None
    found.error(SGLANG, 'speculators format: SGLang knows no such architecture; use the folder with "midlayer.*" names')
    if layer.get("model_type", "llama") != "llama":
        found.note(VLLM, f"the layer is {layer['model_type']}, which is checked as if it were llama")
    flat = {**layer, "architectures": ["Eagle3LlamaForCausalLM"], "speculators": True, "norm_before_residual": True}
    return flat | {name: config[name] for name in SPECULATORS_KEYS if config.get(name) is not None}


def _renamed(tensors: dict[str, Tensor], form: str, found: Findings) -> dict[str, Tensor]:
    """Tensors under the names that both engines read."""
    if any(name.startswith("model.") for name in tensors):
        found.error(VLLM, 'names begin with "model.": vLLM puts its own before them and finds no such parameter')
    if any(re.match(r"(model\.)?layers\.0\.", name) for name in tensors) and form == "llama":
        found.note(
            SGLANG, f'"layers.0.*" names: {OLD_SGLANG} skips them silently and accepts nothing; use "midlayer.*"'
        )
    return {re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model.")): t for name, t in tensors.items()}


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
    """Which target layers each engine reads: vLLM counts inputs, SGLang outputs (one less for the same state)."""
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
            text = f"eagle_config's {list(nested)} is read as vLLM's own count, a layer too early"
            found.error(VLLM, f"{text}: put eagle_aux_hidden_state_layer_ids {shifted} at the top level")
        elif _is_default(nested):
            found.error(SGLANG, f"reads eagle_config's {list(nested)} as outputs, a layer too late, if vLLM is right")
        else:
            text = f"only eagle_config's {list(nested)}: vLLM reads inputs of these layers, SGLang of {shifted}"
            found.note(BOTH, f"{text}; the file does not say which was trained")
    elif not top:
        found.note(BOTH, "no aux layer ids: both engines take their default, 2, N//2, N-3")


def _is_default(ids) -> bool:
    """Whether these are 2, N//2, N-3 of some N."""
    return len(ids) == 3 and list(ids) == [2, (ids[2] + 3) // 2, ids[2]]


def _check_options(config: dict, draft: DraftConfig, tensors: dict[str, Tensor], found: Findings) -> None:
    for name in ("norm_before_residual", "norm_before_fc"):
        if getattr(draft, name) and not config.get("speculators"):
            found.error(SGLANG, f"{name} is not read there: the draft would compute something else, without a word")
    for name in ("fc_norm", "norm_output"):
        if getattr(draft, name):
            found.note(SGLANG, f"{name}: {OLD_SGLANG} ignores it without a word")
    rope = config.get("rope_parameters") or {}
    if rope and "rope_theta" not in config and rope.get("rope_theta", 10000.0) != 10000.0:
        text = f"only rope_parameters: under transformers 4 the theta would be 10000, not {rope['rope_theta']:g}"
        found.note(BOTH, f"{text}; write rope_theta and rope_scaling too")
    if draft.form == "mla" and not draft.q_lora_rank:
        found.error(SGLANG, "no q_lora_rank: its MLA draft needs one")


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
