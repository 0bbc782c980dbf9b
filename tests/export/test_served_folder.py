"""The served folder: what is written passes, each way to break it is refused by name (engines would be silent)."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.draft.network import rope_frequencies
from common.export.served_folder import check_export, describe, export, read_draft_config
from common.pipeline.errors import UserError
from tests.support.draft_folder import KEPT, TEXT, make_draft, write

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
    return write(tmp_path_factory.mktemp("export") / "export")


@pytest.fixture
def broken(exported, tmp_path):
    """A copy of a good export with its tensors or its config changed."""

    def make(change_tensors=None, change_config=None):
        folder = tmp_path / "broken"
        shutil.copytree(exported, folder)
        if change_tensors:
            tensors = load_file(folder / "model.safetensors")
            change_tensors(tensors)
            save_file(tensors, folder / "model.safetensors")
        if change_config:
            config = json.loads((folder / "config.json").read_text())
            change_config(config)
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


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
    assert check_export(tmp_path / "export") == []
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
    config = json.loads((write(tmp_path / "a", rope_theta=5e4, rope_scaling=scaling) / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (5e4, scaling)
    assert config["rope_parameters"] == {**scaling, "rope_type": "linear", "rope_theta": 5e4}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert read_draft_config(new).rope_scaling == scaling | {"rope_type": "linear"}
    assert read_draft_config(new).rope_theta == 5e4
    plain = json.loads((write(tmp_path / "b", rope_scaling={}) / "config.json").read_text())
    assert (plain["rope_theta"], plain["rope_scaling"]) == (10000.0, None)
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert read_draft_config({**plain, "rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize("more", YARN_FACTORS, ids=str)
def test_yarn_has_one_factor_in_every_engine(tmp_path, more):
    """transformers' own rule for the target is what vLLM and both of SGLang's rules make of the export."""
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096} | more
    draft = make_draft(rope_scaling=scaling)[0].config
    frequencies, wanted = rope_frequencies(draft, 4)
    folder = write(tmp_path / "export", rope_scaling=scaling)
    config = json.loads((folder / "config.json").read_text())
    for served in (config["rope_scaling"], config["rope_parameters"]):
        plain = 0.1 * math.log(served["factor"]) + 1
        assert served["attention_factor"] == plain * served["attn_factor"] == pytest.approx(wanted)
        assert not {"mscale", "mscale_all_dim"} & served.keys()  # SGLang's versions disagree on them
    again, factor = rope_frequencies(read_draft_config(config), 4)
    assert torch.equal(again, frequencies) and factor == pytest.approx(wanted) and check_export(folder) == []


@pytest.mark.parametrize("lost", ["factor", "original_max_position_embeddings"])
def test_a_yarn_scaling_that_lacks_a_number_is_named(broken, lost):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    del scaling[lost]
    problems = check_export(broken(change_config=lambda c: c.update(rope_scaling=scaling)))
    assert "needs factor and original_max_position_embeddings" in problems[0]


def test_mla_without_a_query_rank_says_null(tmp_path):
    """vLLM asks whether it is None; with 0, it would build a low rank of nothing."""
    folder = write(tmp_path / "export", form="mla", q_lora_rank=0)
    config = json.loads((folder / "config.json").read_text())
    assert config["q_lora_rank"] is None and read_draft_config(config).q_lora_rank == 0
    assert check_export(folder) == []


def test_other_widths_say_how_many_states(tmp_path):
    folder = write(tmp_path / "export", (1, 2, 5, 9), num_aux=4)
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
    folder = write(tmp_path / "export", **options)
    assert read_draft_config(json.loads((folder / "config.json").read_text())) == make_draft(**options)[0].config
    assert "draft vocabulary 6 of 12" in describe(folder)


def test_the_embedding_may_be_left_to_the_engine(tmp_path):
    folder = write(tmp_path / "export", embedding=False)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors") and check_export(folder) == []


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def shifted(tensors):
    """The first two kept tokens swapped: every id is a kept one, but the rows mean others."""
    tensors["d2t"][0], tensors["d2t"][1] = 3, -1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t.pop("midlayer.self_attn.k_proj.weight"), "midlayer.self_attn.k_proj.weight is missing"),
        (put("d2t", lambda d2t: d2t + torch.arange(6)), "d2t and t2d contradict"),
        (shifted, "d2t and t2d contradict"),
        (put("d2t", lambda d2t: d2t.int()), "d2t is torch.int32"),
        (put("t2d", lambda t2d: t2d.to(torch.uint8)), "t2d torch.uint8"),
        (lambda t: t.update(extra=torch.zeros(2)), "extra is unknown"),
        (lambda t: t.update({"layers.0.fc.weight": t.pop("fc.weight")}), "layers.0.fc.weight is unknown"),
        (lambda t: t["fc.weight"].view(-1)[3:4].fill_(float("nan")), "fc.weight is not finite"),
        (lambda t: t["embed_tokens.weight"].view(-1)[3:4].fill_(float("inf")), "embed_tokens.weight is not finite"),
        (put("fc.weight", lambda fc: fc[:, :16].clone()), r"fc.weight has shape [8, 16], expected [8, 24]"),
        (put("lm_head.weight", lambda head: torch.zeros(12, 8)), "lm_head.weight has shape [12, 8], expected [6, 8]"),
        (put("norm.weight", lambda norm: norm.to(torch.int32)), "norm.weight is torch.int32"),
    ],
)
def test_a_broken_tensor_is_named(broken, change, said):
    problems = check_export(broken(change_tensors=change))
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 4, 8]), "must be vLLM's [1, 4, 8] minus 1"),
        (lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 5, 9]), "minus 1"),
        (lambda c: c.pop("eagle_aux_hidden_state_layer_ids"), "aux layer ids must stand"),
        (lambda c: c.pop("eagle_config"), "aux layer ids must stand"),
        (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux_hidden_state"),
        (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers is 2"),
        (lambda c: c.update(model_type="kimi_k2"), "model_type is 'kimi_k2', expected 'llama'"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is true"),
        (lambda c: c.update(rope_theta=5e4), "rope settings contradict each other"),
        (lambda c: c["rope_parameters"].update(rope_type="linear", factor=2.0), "rope settings contradict"),
        (lambda c: c.pop("draft_vocab_size"), "draft_vocab_size is missing"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
        (lambda c: c.update(architectures=[]), "architectures"),
        (lambda c: c.pop("hidden_size"), "hidden_size"),
        (lambda c: c.update(vocab_size="12"), "config.json"),
        (lambda c: c.update(draft_vocab_size=12), "lm_head.weight has shape [6, 8], expected [12, 8]"),
        (lambda c: c.update(num_attention_heads=4), "q_proj.weight has shape"),
        (lambda c: c.update(hidden_size=16), "has shape"),
    ],
)
def test_a_broken_config_is_named(broken, change, said):
    problems = check_export(broken(change_config=change))
    assert any(said in problem for problem in problems), problems


def test_four_layers_for_an_fc_of_three_states(broken):
    def four(config):
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 5, 9]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 4, 8]

    assert check_export(broken(change_config=four)) == ["4 aux layer ids for an fc of 3 states"]


def test_d2t_with_a_full_vocabulary(tmp_path):
    folder = write(tmp_path / "export", kept=torch.arange(12))
    tensors = load_file(folder / "model.safetensors") | {"d2t": torch.zeros(12, dtype=torch.int64)}
    save_file(tensors, folder / "model.safetensors")
    assert check_export(folder) == ["d2t with a full vocabulary"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_half_file_is_refused(broken, name):
    folder = broken()
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    if name == "config.json":
        with pytest.raises(UserError, match=r"config\.json"):
            check_export(folder)
    else:
        assert "cannot be read" in check_export(folder)[0]


def test_a_draft_that_would_not_serve_never_gets_the_final_name(tmp_path):
    """The last good export stays, too."""
    folder = write(tmp_path / "export")
    before = (folder / "model.safetensors").read_bytes()
    draft, d2t, t2d = make_draft()
    with torch.no_grad():
        draft.fc.weight[0, 0] = float("nan")
    for good in (draft, make_draft()[0]):
        wrong = d2t if good is draft else d2t + torch.arange(6)
        with pytest.raises(UserError, match=r"fc\.weight is not finite|contradict"):
            export(folder, good, wrong, t2d, (2, 5, 9), TEXT)
        assert (folder / "model.safetensors").read_bytes() == before and check_export(folder) == []
    with pytest.raises(UserError, match="would not serve"):
        export(tmp_path / "new", draft, d2t, t2d, (2, 5, 9), TEXT)
    assert not (tmp_path / "new").exists()
