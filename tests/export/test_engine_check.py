"""04 --check-export: what each engine would do with our folders and with those that others publish."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.export.engine_check import inspect
from common.export.findings import SGLANG, VLLM
from common.export.speculators_layout import write_speculators
from tests.support.draft_folder import KEPT, write
from tests.support.stages import DEMO, run_here

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return write(tmp_path_factory.mktemp("ours") / "export")


@pytest.fixture
def published(ours, tmp_path):
    """A copy of a good export, changed into what somebody else would write."""

    def make(change_config=None, change_tensors=None, source=ours):
        tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
        (change_config or dict)(config)
        (change_tensors or dict)(tensors)
        folder = tmp_path / "published"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def renamed(change):
    def apply(tensors):
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return apply


def levels(found, level: str) -> str:
    return "\n".join(str(finding) for finding in found if finding.level == level)


@pytest.mark.parametrize(
    "options",
    [{}, {"form": "mla"}, {"kept": torch.arange(12)}, {"embedding": False}, {"fc_norm": True, "norm_output": True}],
)
def test_what_we_export_is_served_by_both(tmp_path, options):
    found = inspect(write(tmp_path / "export", **options))
    assert found.servable() == [VLLM, SGLANG], levels(found, "error")
    assert "aux layers: inputs of [2, 5, 9], for both engines" in levels(found, "note")


def test_four_states_are_served(tmp_path):
    found = inspect(write(tmp_path / "export", (1, 2, 5, 9), num_aux=4))
    assert found.servable() == [VLLM, SGLANG] and "4 aux states" in levels(found, "note")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_before_residual": True}, "norm_before_residual is not read there"),
        ({"norm_before_fc": True}, "norm_before_fc is not read there"),
    ],
)
def test_options_that_one_engine_does_not_know(tmp_path, options, said):
    found = inspect(write(tmp_path / "export", **options))
    assert found.servable() == [VLLM] and said in levels(found, "error")


@pytest.mark.parametrize("name", ["layers.0.", "model.midlayer.", "model.layers.0."])
def test_other_spellings(published, name):
    found = inspect(published(change_tensors=renamed(lambda n: n.replace("midlayer.", name))))
    assert found.servable() == ([SGLANG] if name.startswith("model.") else [VLLM, SGLANG])
    assert ("skips them silently" in levels(found, "note")) == ("layers.0" in name)


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
        ([2, 6, 9], None, [VLLM, SGLANG], "its default, 2, N//2, N-3, is vLLM's [2, 6, 9] with 12 layers"),
        ([1, 6, 9], None, [VLLM], "would be read and not [1, 6, 9]"),
        (None, [1, 29, 57], [VLLM, SGLANG], "a layer too early: put eagle_aux_hidden_state_layer_ids [2, 30, 58]"),
        (None, [2, 30, 58], [VLLM], "a layer too late"),
        (None, [4, 7, 9], [SGLANG], "put the ids at the top level, [5, 8, 10] if these are SGLang's count"),
        (None, None, [VLLM, SGLANG], "both engines take their default"),
        ([2, 30, 58], [2, 30, 58], [VLLM], "one of the two engines is wrong"),
        ([2, 30], [1, 29], [], "fc reads 3 aux states, the engines would build 2"),
    ],
)
def test_layer_lists(published, top, nested, servable, said):
    found = inspect(published(lists(top, nested)))
    assert found.servable() == servable and said in "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("config", "tensors", "servable", "said"),
    [
        (None, lambda t: t.pop("fc.weight"), [], "fc.weight is missing: it stays random, without a word"),
        (None, lambda t: t.pop("lm_head.weight"), [], "no lm_head.weight: vLLM cuts the target's"),
        (None, lambda t: t.pop("d2t"), [], "draft ids would be taken for target ids"),
        (None, lambda t: t.pop("t2d"), [VLLM, SGLANG], "no t2d: neither engine reads it"),
        (None, lambda t: t.pop("embed_tokens.weight"), [VLLM, SGLANG], "both take the target's"),
        (None, lambda t: t.update(d2t=KEPT.clone()), [], "it looks absolute"),
        (None, lambda t: t.update(d2t=t["d2t"].int()), [VLLM, SGLANG], "d2t is torch.int32"),
        (None, lambda t: t["t2d"].logical_not_(), [], "contradict"),
        (None, lambda t: t.update(odd=torch.zeros(1)), [SGLANG], "odd: no such parameter, refused"),
        (None, lambda t: t["norm.weight"].fill_(float("nan")), [], "norm.weight is not finite"),
        (None, lambda t: t.update({"norm.weight": torch.zeros(3)}), [], "norm.weight has shape [3]"),
        (lambda c: c.update(num_hidden_layers=2), None, [], "num_hidden_layers is 2, but layers [0] are there"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), None, [VLLM], 'rename it to "LlamaForCausalLMEagle3"'),
        (lambda c: c.update(architectures=["BertModel"]), None, [], "no EAGLE-3 draft"),
        (lambda c: c.pop("draft_vocab_size"), None, [], "lm_head.weight has shape [6, 8], config.json says [12, 8]"),
        (lambda c: c.update(tie_word_embeddings=True), None, [VLLM], "the embedding would be the head"),
        (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), None, [], "the last state would be fed"),
        (lambda c: c.pop("rms_norm_eps"), None, [VLLM, SGLANG], "no rms_norm_eps: transformers' default is taken"),
        (lambda c: c.pop("hidden_size"), None, [], "hidden_size"),
    ],
)  # fmt: skip
def test_what_others_leave_out_or_break(published, config, tensors, servable, said):
    found = inspect(published(config, tensors))
    assert said in "\n".join(map(str, found)) and found.servable() == servable, list(map(str, found))


def test_a_full_vocabulary_may_take_the_targets_head(published, tmp_path):
    full = write(tmp_path / "full", kept=torch.arange(12))
    found = inspect(published(lambda c: c.update(draft_vocab_size=None), lambda t: t.pop("lm_head.weight"), full))
    assert found.servable() == [VLLM, SGLANG] and "no lm_head.weight: the target's is taken" in levels(found, "note")
    save_file(load_file(full / "model.safetensors") | {"d2t": torch.zeros(12).long()}, full / "model.safetensors")
    assert inspect(full).servable() == [SGLANG]


def test_an_mla_draft_under_the_targets_own_model_type(published, tmp_path):
    mla = write(tmp_path / "mla", form="mla")
    found = inspect(published(lambda c: c.update(model_type="deepseek_v3"), None, mla))
    assert found.servable() == [SGLANG] and "own MTP layer" in levels(found, "error")


def test_transformers_5_alone(published):
    def change(config):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e4}
        config.pop("rope_theta"), config.pop("rope_scaling")

    assert "under transformers 4 the theta would be 10000, not 50000" in levels(inspect(published(change)), "note")


class Code:
    """A pickle that runs something when it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_pickled_weights_are_read_without_running_them(published):
    folder = published()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found = inspect(folder)
    assert found.servable() == [VLLM, SGLANG] and "safetensors is safer" in levels(found, "note")
    for wrong in (tensors | {"code": Code()}, [tensors], {"state": tensors}):
        torch.save(wrong, folder / "pytorch_model.bin")
        (error,) = [finding for finding in inspect(folder) if finding.level == "error"]
        assert "pytorch_model.bin cannot be read: " in error.text and "\n" not in error.text
    (folder / "pytorch_model.bin").write_bytes(b"half")
    assert "pytorch_model.bin cannot be read" in levels(inspect(folder), "error")
    (folder / "model.safetensors").write_bytes(b"half")
    assert "model.safetensors cannot be read" in levels(inspect(folder), "error")


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
    assert found.servable() == [VLLM] and "none there has its norms" in levels(found, "error")


def test_a_norm_before_fc_that_stands_in_eagle_config(published, tmp_path):
    before = write(tmp_path / "before", norm_before_fc=True)

    def move(config):
        config["eagle_config"]["norm_before_fc"] = config.pop("norm_before_fc")

    found = inspect(published(move, None, before))
    assert found.servable() == [VLLM] and "norm_before_fc is not read there" in levels(found, "error")


@pytest.mark.parametrize(("rank", "servable"), [(None, [VLLM]), (0, [])])
def test_mla_without_a_query_rank(published, tmp_path, rank, servable):
    mla = write(tmp_path / "mla", form="mla", q_lora_rank=0)
    assert inspect(published(lambda c: c.update(q_lora_rank=rank), None, mla)).servable() == servable


def test_the_speculators_layout(ours, tmp_path):
    write_speculators(tmp_path / "other", ours, "some/target", 3)
    found = inspect(tmp_path / "other")
    assert found.servable() == [VLLM] and "speculators format" in levels(found, "error")


def test_the_switch_prints_a_line_a_finding_and_a_verdict(ours, published):
    code, out, _ = run_here("04", "--config", DEMO, "--check-export", ours)
    assert code == 0 and out.splitlines()[-1] == f"{ours}: servable with vLLM and SGLang"
    folder = published(change_tensors=lambda t: t.pop("fc.weight"))
    code, out, _ = run_here("04", "--config", DEMO, "--check-export", folder)
    assert code == 2 and out.splitlines()[0].startswith("error  vLLM, SGLang  fc.weight is missing")
    assert out.splitlines()[-1] == f"{folder}: not servable"
    code, _, err = run_here("04", "--config", DEMO, "--check-export", folder / "nowhere")
    assert code == 2 and "no such file" in err
