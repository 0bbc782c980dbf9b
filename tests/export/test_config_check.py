"""What each engine makes of a draft's config.json: aux layers, options, architectures, rotary angles."""

import pytest
import torch

from common.export.engine_check import inspect
from common.export.findings import SGLANG, VLLM
from tests.support.drafts import TEXT, levels, write_draft

IDS = "eagle_aux_hidden_state_layer_ids"


def test_an_option_that_sglang_does_not_know_is_no_fault_of_the_folder(tmp_path):
    findings = inspect(write_draft(tmp_path / "export", norm_before_residual=True))
    assert findings.servable() == [VLLM]
    assert findings.faults() == []
    assert "norm_before_residual is not read by SGLang" in levels(findings, "unsupported")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_before_fc": True}, "some SGLang versions before 0.5.23 do not read it"),
        ({"fc_norm": True, "norm_output": True}, "norm_output: vLLM before 0.22 and some SGLang versions"),
    ],
)
def test_options_that_older_versions_do_not_know(tmp_path, options, said):
    findings = inspect(write_draft(tmp_path / "export", **options))
    assert findings.servable() == [VLLM, SGLANG]
    assert said in levels(findings, "note")


@pytest.mark.parametrize("form", ["llama", "mla"])
@pytest.mark.parametrize("target_type", ["kimi_k2", "deepseek_v3", "llama"])
@pytest.mark.parametrize("first", [1, 2])
def test_aux_layers_that_sglang_counts_differently_for_deepseek_targets(tmp_path, form, target_type, first):
    """It adds one to the ids only where the first is 1, so that others are read a layer too early."""
    text = TEXT | {"model_type": target_type}
    findings = inspect(write_draft(tmp_path / "export", (first, 5, 9), text, form=form), target_type)
    early = first != 2 and (form == "mla" or target_type != "llama")
    assert findings.servable() == ([VLLM] if early else [VLLM, SGLANG])
    assert ("a layer too early" in levels(findings, "unsupported")) == early
    assert findings.faults() == []


def lists(top, nested):
    def change(config):
        for name in (IDS, "eagle_config"):
            config.pop(name)
        if top:
            config[IDS] = top
        if nested:
            config["eagle_config"] = {IDS: nested, "use_aux_hidden_state": True}

    return change


@pytest.mark.parametrize(
    ("top", "nested", "servable", "said"),
    [
        ([2, 6, 9], None, [VLLM, SGLANG], "2, N//2, N-3: vLLM's [2, 6, 9] for a target of 12 layers"),
        ([1, 6, 9], None, [VLLM], "2, N//2, N-3, and not [1, 6, 9]"),
        (None, [1, 29, 57], [VLLM, SGLANG], "a layer too early; write eagle_aux_hidden_state_layer_ids [2, 30, 58]"),
        (None, [2, 30, 58], [VLLM], "a layer later than vLLM's default"),
        (None, [4, 7, 9], [SGLANG], "write [5, 8, 10] at the top level if the list is in SGLang's count"),
        (None, None, [VLLM, SGLANG], "both engines take their default"),
        ([2, 30, 58], [2, 30, 58], [VLLM], "one of the two reads other layers"),
        ([2, 30], [1, 29], [], "fc.weight reads 3 aux states, the engines would build 2"),
    ],
)
def test_layer_lists(published, top, nested, servable, said):
    found = inspect(published(lists(top, nested)))
    assert found.servable() == servable and said in "\n".join(map(str, found))


@pytest.mark.parametrize("top", [None, [2, 30, 58]])
@pytest.mark.parametrize(("target_type", "servable"), [("kimi_k2", [VLLM, SGLANG]), ("llama", [VLLM])])
def test_a_list_in_vllms_count_is_right_for_deepseek_targets_alone(published, top, target_type, servable):
    assert inspect(published(lists(top, [2, 30, 58])), target_type).servable() == servable


def test_four_layers_for_an_fc_of_three_states(published):
    def four(config):
        config[IDS] = [1, 2, 5, 9]
        config["eagle_config"][IDS] = [0, 1, 4, 8]

    faults = inspect(published(four)).faults()
    assert "fc.weight reads 3 aux states, the engines would build 4: set num_aux_hidden_states to 3" in faults
    assert f"{IDS} names 4 aux layers for an fc of 3 states" in faults


@pytest.mark.parametrize("lost", ["factor", "original_max_position_embeddings"])
def test_a_yarn_scaling_that_lacks_a_number_is_named(published, lost):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    del scaling[lost]
    (fault,) = inspect(published(lambda c: c.update(rope_scaling=scaling))).faults()
    assert "needs factor and original_max_position_embeddings" in fault


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_mla_draft_under_a_model_type_without_mla(published, tmp_path, model_type):
    mla = write_draft(tmp_path / "mla", form="mla")
    (fault,) = inspect(published(lambda c: c.update(model_type=model_type), None, mla)).faults()
    assert f'model_type is "{model_type}"' in fault and 'write "kimi_k2"' in fault


def test_an_mla_draft_under_the_targets_own_model_type(published, tmp_path):
    mla = write_draft(tmp_path / "mla", form="mla")
    found = inspect(published(lambda c: c.update(model_type="deepseek_v3"), None, mla))
    assert found.servable() == [SGLANG] and "own MTP layer" in levels(found, "error")


def test_transformers_5_alone(published):
    def change(config):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e4}
        config.pop("rope_theta"), config.pop("rope_scaling")

    assert "transformers 4 would take theta 10000, not 50000" in levels(inspect(published(change)), "note")


@pytest.mark.parametrize(
    ("scaling", "servable"),
    [
        ({}, [VLLM, SGLANG]),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, [VLLM]),  # SGLang before 2026 does not read them
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attn_factor": 0.70627}, [VLLM]),  # SGLang since then does
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.41589}, [VLLM]),
        ({"attention_factor": 1.0}, [VLLM]),
        ({"attention_factor": 1.0, "attn_factor": 0.70627}, [VLLM, SGLANG]),
        ({"attn_factor": 2.0}, [VLLM]),
    ],
)
def test_yarn_factors_that_engines_read_differently(published, scaling, servable):
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096} | scaling

    def change(config):
        config["rope_scaling"] = yarn
        del config["rope_parameters"]

    found = inspect(published(change))
    assert found.servable() == servable and (len(servable) == 2 or "attn_factor" in levels(found, "error"))


@pytest.mark.parametrize(
    "name", ["Eagle3Qwen3vlForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"]
)
def test_names_that_vllm_alone_knows(published, name):
    found = inspect(published(lambda c: c.update(architectures=[name])))
    assert found.servable() == [VLLM] and 'rename it to "LlamaForCausalLMEagle3"' in levels(found, "error")


def test_norms_on_queries_and_keys(published):
    def norms(tensors):
        tensors |= {f"midlayer.self_attn.{name}_norm.weight": torch.ones(4) for name in "qk"}

    found = inspect(published(lambda c: c.update(architectures=["Eagle3Qwen3ForCausalLM"]), norms))
    assert found.servable() == [VLLM] and "SGLang has no EAGLE-3 draft with q_norm and k_norm" in levels(
        found, "unsupported"
    )


def test_a_norm_before_fc_that_stands_in_eagle_config(published, tmp_path):
    before = write_draft(tmp_path / "before", norm_before_fc=True)

    def move(config):
        config["eagle_config"]["norm_before_fc"] = config.pop("norm_before_fc")

    found = inspect(published(move, None, before))
    assert found.servable() == [VLLM, SGLANG] and "norm_before_fc: " in levels(found, "note")


@pytest.mark.parametrize(("rank", "servable"), [(None, [VLLM]), (0, [])])
def test_mla_without_a_query_rank(published, tmp_path, rank, servable):
    mla = write_draft(tmp_path / "mla", form="mla", q_lora_rank=0)
    assert inspect(published(lambda c: c.update(q_lora_rank=rank), None, mla)).servable() == servable


def test_the_length_beyond_which_vllm_does_not_draft_is_named(published):
    findings = inspect(published(lambda config: config.update(max_position_embeddings=2048)))
    assert "max_position_embeddings is 2048: vLLM drafts nothing, or fails, beyond" in levels(findings, "note")
    assert findings.servable() == [VLLM, SGLANG]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rotary_dim": 2}, "rotary_dim 2"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"]}, "layer_types 'sliding_attention'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e4}}}, "rope_parameters by layer type"),
    ],
)
def test_options_that_the_draft_here_cannot_compute_are_named(published, options, named):
    findings = inspect(published(lambda config: config.update(options)))
    assert f"{named}: this check computes the draft without" in levels(findings, "note")


def test_another_activation_is_refused(published):
    findings = inspect(published(lambda config: config.update(hidden_act="gelu")))
    assert findings.servable() == []
    assert "hidden_act is 'gelu'" in levels(findings, "error")


@pytest.mark.parametrize("ids", [[2, 2, 9], [-1, 5, 9]])
def test_aux_layers_that_no_target_has_are_named(published, ids):
    faults = inspect(published(lists(ids, [layer - 1 for layer in ids]))).faults()
    assert f"{IDS} is {ids}: aux layers must differ and not be negative" in faults
