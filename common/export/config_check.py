"""What vLLM and SGLang make of a draft's config.json: architecture, aux layers, options, rotary angles."""

import math

from common.draft.config import DraftConfig
from common.draft.network import rope_frequencies, yarn_mscale
from common.export.findings import BOTH, SGLANG, SOME_SGLANG, VLLM, Findings
from common.export.published_draft import HEAD_NORMS, foreign_options
from common.export.served_config import ARCHITECTURES, LAYER_IDS, MODEL_TYPES

DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")  # engines choose MLA attention by these model types
# Options of a draft -> the versions that do not read them.
OLDER = {
    "norm_before_fc": (SGLANG, SOME_SGLANG),
    "fc_norm": (BOTH, f"vLLM before 0.22 and {SOME_SGLANG}"),
    "norm_output": (BOTH, f"vLLM before 0.22 and {SOME_SGLANG}"),
}


def check_config(config: dict, draft: DraftConfig, target_type: str, findings: Findings) -> None:
    """Findings for a config as read_config returns it; `draft`: its sizes, with the aux states that fc reads."""
    _check_architecture(config, draft.form, findings)
    if config.get("last_state_only"):
        findings.note(BOTH, "no fc: engines feed the last state alone, which is not the kind of draft trained here")
    else:
        _check_aux_layers(config, draft, target_type, findings)
    _check_options(config, draft, findings)
    _check_rope(config, draft, findings)


def _check_architecture(config: dict, form: str, findings: Findings) -> None:
    name, model_type = config["architecture"], config.get("model_type", MODEL_TYPES[form])
    if name == HEAD_NORMS:
        findings.unsupported(SGLANG, "SGLang has no EAGLE-3 draft with q_norm and k_norm; serve with vLLM")
    elif name != ARCHITECTURES[form] and "speculators" not in config:
        findings.error(SGLANG, f'architecture "{name}" is unknown to SGLang; rename it to "{ARCHITECTURES[form]}"')
    if form == "mla" and model_type == "deepseek_v3":
        text = 'model_type is "deepseek_v3", which vLLM takes for the target\'s own MTP layer'
        findings.error(VLLM, f'{text}; rename it to "{MODEL_TYPES[form]}"')
    elif (form == "mla") != (model_type in DEEPSEEK_TYPES):
        text = f'model_type is "{model_type}": engines would choose another kind of attention than {name} has'
        findings.error(BOTH, f'{text}; write "{MODEL_TYPES[form]}"')


def _check_aux_layers(config: dict, draft: DraftConfig, target_type: str, findings: Findings) -> None:
    """Which target layers each engine reads. vLLM counts inputs, SGLang outputs (one less for the same state).

    vLLM reads the top-level list alone, else its default 2, N//2, N-3; its V1 runner reads eagle_config's list before
    the default, as inputs. SGLang reads eagle_config's list alone, else the same default.
    """
    top, eagle = config.get(LAYER_IDS), config["eagle_config"]
    nested = eagle.get(LAYER_IDS)
    for ids, name in ((top, LAYER_IDS), (nested, "eagle_config's list")):
        if ids and len(ids) != draft.num_aux:
            findings.error(BOTH, f"{name} names {len(ids)} aux layers for an fc of {draft.num_aux} states")
        if ids and (min(ids) < 0 or len(set(ids)) < len(ids)):
            findings.error(BOTH, f"{name} is {ids}: aux layers must differ and not be negative")
    if eagle.get("use_aux_hidden_state") is False:
        findings.error(BOTH, "eagle_config.use_aux_hidden_state is false: engines would feed the last state, not fc's")
    # SGLang's exception: of a DeepSeek or Kimi target it reads the list as inputs unless the list begins with 1.
    exception = bool(nested) and nested[0] != 1
    deepseek = draft.form == "mla" or target_type in DEEPSEEK_TYPES
    outputs_as_inputs = [layer + 1 for layer in nested or ()]
    inputs = nested if exception and deepseek else outputs_as_inputs
    if top and nested:
        early = f"of a DeepSeek or Kimi target SGLang reads eagle_config's {nested} as inputs, a layer too early"
        if inputs == top:
            findings.note(BOTH, f"aux layers: inputs of {top}, for both engines")
            if exception and not deepseek and not target_type:
                findings.note(SGLANG, f"{early}; other targets are not concerned")
        elif outputs_as_inputs == top:
            findings.unsupported(SGLANG, f"{early}; serve with vLLM, or train on aux layers that begin with 2")
        else:
            text = f"SGLang reads eagle_config's {nested} as inputs of {inputs}, but vLLM reads {top}"
            findings.error(SGLANG, f"{text}: one of the two reads other layers than the draft was trained on")
    elif top and not config.get("speculators"):
        text = "without eagle_config's list SGLang takes its default, 2, N//2, N-3"
        if _is_default(top):
            findings.note(SGLANG, f"{text}: vLLM's {top} for a target of {top[2] + 3} layers")
        else:
            findings.error(SGLANG, f"{text}, and not {top}; write {[layer - 1 for layer in top]} in eagle_config")
    elif nested:
        if _is_default(nested) and inputs == nested:
            findings.note(BOTH, f"aux layers: inputs of {inputs}, for both engines: SGLang's rule and vLLM's default")
        elif _is_default(inputs):
            text = "vLLM's V1 model runner (the only one on a CPU, gone in 0.34) reads eagle_config's"
            text += f" {nested} as inputs, a layer too early"
            findings.note(VLLM, f"{text}; write {LAYER_IDS} {inputs} at the top level")
        elif _is_default(nested):
            text = f"SGLang reads eagle_config's {nested} as outputs, a layer later than vLLM's default"
            findings.error(SGLANG, f"{text}; write {[layer - 1 for layer in nested]} if vLLM is right")
        else:
            text = f"vLLM silently takes its default, 2, N//2, N-3: eagle_config's {nested} is not read"
            findings.error(VLLM, f"{text}; write {inputs} at the top level if the list is in SGLang's count")
    elif not top:
        findings.note(BOTH, "no aux layer ids: both engines take their default, 2, N//2, N-3")


def _is_default(ids: list[int]) -> bool:
    """Whether these are 2, N//2, N-3 of some number of layers N."""
    return len(ids) == 3 and ids[:2] == [2, (ids[2] + 3) // 2]


def _check_options(config: dict, draft: DraftConfig, findings: Findings) -> None:
    if config.get("hidden_act", "silu") != "silu":
        findings.error(
            BOTH, f"hidden_act is {config['hidden_act']!r}, which the engines refuse: a draft must have silu"
        )
    elif options := foreign_options(config):
        text = f"{', '.join(options)}: this check computes the draft without"
        findings.note(BOTH, f"{text}; measure the acceptance before relying on it")
    if draft.norm_before_residual and not config.get("speculators"):
        text = "norm_before_residual is not read by SGLang, which would compute another draft silently"
        findings.unsupported(SGLANG, f"{text}; serve with vLLM")
    for name, (engines, versions) in OLDER.items():
        if getattr(draft, name):
            findings.note(engines, f"{name}: {versions} do not read it")
    text = f"max_position_embeddings is {draft.max_position_embeddings}"
    text += ": vLLM drafts nothing, or fails, beyond that length"
    findings.note(VLLM, f"{text}; write the target's if it is longer")
    if draft.form == "mla" and not draft.q_lora_rank:
        findings.unsupported(SGLANG, "no q_lora_rank: SGLang's MLA draft needs one; serve with vLLM")
        if config.get("q_lora_rank") is not None:
            findings.error(VLLM, "q_lora_rank is 0, which vLLM takes for a rank: write null")


def _check_rope(config: dict, draft: DraftConfig, findings: Findings) -> None:
    """transformers 4 reads rope_theta and rope_scaling; 5 reads rope_parameters before them."""
    new = config.get("rope_parameters") or {}
    if new and "rope_theta" in config:
        theta, new_theta = float(config["rope_theta"]), float(new.get("rope_theta", config["rope_theta"]))
        scaling, new_scaling = _scaling(config.get("rope_scaling")), _scaling(new)
        if theta != new_theta or scaling != new_scaling:
            old = f"rope_theta {theta:g} with rope_scaling {scaling or None}"
            text = f"{old} (transformers 4) and rope_parameters {new} (transformers 5) contradict each other"
            findings.error(BOTH, f"{text}: make them equal")
    elif new.get("rope_theta", 10000.0) != 10000.0:
        text = f"only rope_parameters: transformers 4 would take theta 10000, not {new['rope_theta']:g}"
        findings.note(BOTH, f"{text}; write rope_theta and rope_scaling too")
    if draft.form == "llama" and draft.rope_type == "yarn":
        _check_yarn(draft, findings)


def _scaling(values: dict | None) -> dict:
    """A rotary scaling in one spelling; empty for plain angles."""
    values = values or {}
    kind = values.get("rope_type", values.get("type", "default"))
    others = {key: value for key, value in values.items() if key not in ("rope_type", "type", "rope_theta")}
    return {} if kind == "default" else {"rope_type": kind, **others}


def _check_yarn(draft: DraftConfig, findings: Findings) -> None:
    """YaRN's factor on cos and sin. No SGLang reads attention_factor, and some versions do not read mscale."""
    factor, scaling = rope_frequencies(draft, draft.head_dim)[1], draft.rope_scaling
    plain = with_mscale = yarn_mscale(scaling["factor"])
    if None not in (numbers := [scaling.get(key) for key in ("mscale", "mscale_all_dim")]):
        with_mscale = yarn_mscale(scaling["factor"], numbers[0]) / yarn_mscale(scaling["factor"], numbers[1])
    for versions, computed in ((SOME_SGLANG, plain), ("SGLang", with_mscale)):
        value = scaling.get("attn_factor", 1.0) * computed
        if not math.isclose(value, factor, rel_tol=1e-3):
            text = f"yarn: {versions} multiply cos and sin by {value:.4g}, vLLM by {factor:.4g}; in rope_scaling"
            fix = f"write attention_factor {factor:g} and attn_factor {factor / plain:g} in place of mscale"
            findings.error(SGLANG, f"{text} {fix}")
            return
