"""The served folder: what is written is what engines read, and a draft that would not serve is never published."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from common.draft.network import rope_frequencies
from common.export.engine_check import inspect
from common.export.served_config import read_draft_config
from common.export.served_folder import describe, export
from common.pipeline.errors import UserError
from tests.support.drafts import KEPT, TEXT, make_draft, write_draft

LAYER = {
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
    "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
    "fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight",
}  # fmt: skip
YARN_FACTORS = [
    {},
    {"mscale": 1.0},
    {"mscale": 1.0, "mscale_all_dim": 1.0},  # Kimi's and DeepSeek's
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"attention_factor": 1.25},
    {"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5},
]
ATTENTION = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mla": {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return write_draft(tmp_path_factory.mktemp("export") / "export")


@pytest.mark.parametrize("form", ["llama", "mla"])
@pytest.mark.parametrize("kept", [KEPT, torch.arange(12)], ids=["reduced", "full"])
def test_names_and_types_are_what_engines_read(tmp_path, form, kept):
    draft, d2t, t2d = make_draft(form, kept)
    export(tmp_path / "export", draft, d2t, t2d, (2, 5, 9), TEXT)
    tensors = load_file(tmp_path / "export/model.safetensors")
    mapping = {"d2t", "t2d"} if len(kept) < 12 else set()  # vLLM refuses d2t with a full vocabulary
    assert set(tensors) == LAYER | {f"midlayer.self_attn.{name}.weight" for name in ATTENTION[form]} | mapping
    assert {name for name, t in tensors.items() if t.dtype != torch.bfloat16} == mapping
    for name, parameter in draft.named_parameters():
        assert torch.equal(tensors[name], parameter.bfloat16())
    if mapping:
        assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == [0, 2, 2, 4, 5, 6]
        assert tensors["t2d"].dtype == torch.bool and torch.nonzero(tensors["t2d"]).flatten().tolist() == KEPT.tolist()
    assert inspect(tmp_path / "export").faults() == []
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_config_counts_layers_twice_as_two_engines_do(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 9]
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}
    assert config["eagle_config"] == nested
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (12, 6, 1)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, False)
    assert config["torch_dtype"] == "bfloat16" and "num_aux_hidden_states" not in config


def test_rope_stands_in_the_forms_of_transformers_4_and_5(tmp_path):
    """Version 4 takes theta 10000 where only rope_parameters stands, without a word."""
    scaling = {"type": "linear", "factor": 64.0}
    config = json.loads((write_draft(tmp_path / "a", rope_theta=5e4, rope_scaling=scaling) / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5e4, scaling)
    assert config["rope_parameters"] == {**scaling, "rope_type": "linear", "rope_theta": 5e4}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert read_draft_config(new).rope_scaling == scaling | {"rope_type": "linear"}
    assert read_draft_config(new).rope_theta == 5e4
    plain = json.loads((write_draft(tmp_path / "b", rope_scaling={}) / "config.json").read_text())
    assert (plain["rope_theta"], plain["rope_scaling"]) == (10000.0, None)
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert read_draft_config({**plain, "rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize("more", YARN_FACTORS, ids=str)
def test_yarn_has_one_factor_in_every_engine(tmp_path, more):
    """transformers' own rule for the target is what vLLM and both of SGLang's rules make of the export."""
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096} | more
    draft = make_draft(rope_scaling=scaling)[0].config
    frequencies, wanted = rope_frequencies(draft, 4)
    folder = write_draft(tmp_path / "export", rope_scaling=scaling)
    config = json.loads((folder / "config.json").read_text())
    for served in (config["rope_scaling"], config["rope_parameters"]):
        plain = 0.1 * math.log(served["factor"]) + 1
        assert served["attention_factor"] == plain * served["attn_factor"] == pytest.approx(wanted)
        assert not {"mscale", "mscale_all_dim"} & served.keys()  # SGLang's versions disagree on them
    again, factor = rope_frequencies(read_draft_config(config), 4)
    assert torch.equal(again, frequencies) and factor == pytest.approx(wanted) and inspect(folder).faults() == []


def test_mla_without_a_query_rank_says_null(tmp_path):
    """vLLM asks whether it is None; with 0, it would build a low rank of nothing."""
    folder = write_draft(tmp_path / "export", form="mla", q_lora_rank=0)
    config = json.loads((folder / "config.json").read_text())
    assert config["q_lora_rank"] is None and read_draft_config(config).q_lora_rank == 0
    assert inspect(folder).faults() == []


def test_other_widths_say_how_many_states(tmp_path):
    folder = write_draft(tmp_path / "export", (1, 2, 5, 9), num_aux=4)
    assert json.loads((folder / "config.json").read_text())["num_aux_hidden_states"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "mla"},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "rope_theta": 5e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_the_config_gives_the_draft_back(tmp_path, options):
    folder = write_draft(tmp_path / "export", **options)
    assert read_draft_config(json.loads((folder / "config.json").read_text())) == make_draft(**options)[0].config
    assert "draft vocabulary 6 of 12" in describe(folder)


@pytest.mark.parametrize("wrong", ["weight", "mapping"])
def test_a_draft_that_would_not_serve_never_gets_the_final_name(tmp_path, wrong):
    """The last good export stays, too."""
    folder = write_draft(tmp_path / "export")
    before = (folder / "model.safetensors").read_bytes()
    draft, d2t, t2d = make_draft()
    if wrong == "weight":
        with torch.no_grad():
            draft.fc.weight[0, 0] = float("nan")
    else:
        d2t = d2t + torch.arange(6)
    named = {"weight": r"fc\.weight is not finite", "mapping": "d2t holds offsets"}[wrong]
    with pytest.raises(UserError, match=f"would not serve.*{named}"):
        export(folder, draft, d2t, t2d, (2, 5, 9), TEXT)
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="would not serve"):
        export(tmp_path / "new", draft, d2t, t2d, (2, 5, 9), TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_weights_that_read_back_differently_are_not_published(tmp_path, monkeypatch):
    def another_bit(path):
        tensors = load_file(path)
        tensors["norm.weight"][0] += 1
        return tensors

    monkeypatch.setattr("common.export.served_folder.load_file", another_bit)
    with pytest.raises(UserError, match=r"norm\.weight read back differently"):
        write_draft(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_the_mapping_is_written_as_int64_and_bool(tmp_path):
    draft, d2t, t2d = make_draft()
    export(tmp_path / "export", draft, d2t.int(), t2d.to(torch.uint8), (2, 5, 9), TEXT)
    tensors = load_file(tmp_path / "export/model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
