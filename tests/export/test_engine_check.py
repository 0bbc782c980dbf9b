"""The check of a draft's folder: what each engine would do with our export, broken copies, and published drafts."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.export.engine_check import inspect
from common.export.findings import CHECKED, SGLANG, VLLM
from common.export.speculators_layout import write_speculators
from common.pipeline.errors import UserError
from tests.support.drafts import KEPT, TEXT, changed_copy, pickle_weights, write_draft
from tests.support.stages import DEMO, ROOT, run_here

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return write_draft(tmp_path_factory.mktemp("ours") / "export")


@pytest.fixture
def published(ours, tmp_path):
    """A copy of a good export, changed into what somebody else would write."""

    def make(change_config=None, change_tensors=None, source=ours):
        return changed_copy(source, tmp_path / "published", change_tensors, change_config)

    return make


def test_the_versions_that_were_read_are_those_that_the_rehearsal_installs():
    """Fails when the pinned vLLM moves: read its eagle3 loaders again, correct the findings, then CHECKED."""
    pinned = (ROOT / "tests/end_to_end/constraints-vllm.txt").read_text()
    assert re.search(r"^vllm(?:-cpu)?==(\d+\.\d+)", pinned, re.MULTILINE)[1] == CHECKED[VLLM]


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
    found = inspect(write_draft(tmp_path / "export", **options))
    assert found.servable() == [VLLM, SGLANG], levels(found, "error")
    assert "aux layers: inputs of [2, 5, 9], for both engines" in levels(found, "note")


def test_four_states_are_served(tmp_path):
    found = inspect(write_draft(tmp_path / "export", (1, 2, 5, 9), num_aux=4))
    assert found.servable() == [VLLM, SGLANG] and "4 aux states" in levels(found, "note")


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


@pytest.mark.parametrize("name", ["layers.0.", "model.midlayer.", "model.layers.0."])
def test_other_spellings(published, name):
    found = inspect(published(change_tensors=renamed(lambda n: n.replace("midlayer.", name))))
    assert found.servable() == ([SGLANG] if name.startswith("model.") else [VLLM, SGLANG])
    assert ("skip them silently" in levels(found, "note")) == ("layers.0" in name)


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
        (put("d2t", lambda d2t: d2t + torch.arange(6)), "d2t holds offsets"),
        (shifted, "d2t and t2d contradict"),
        (lambda t: t.update(extra=torch.zeros(2)), "extra: vLLM has no such parameter"),
        (
            lambda t: t.update({"layers.0.fc.weight": t.pop("fc.weight")}),
            "midlayer.fc.weight: vLLM has no such parameter",
        ),
        (lambda t: t["fc.weight"].view(-1)[3:4].fill_(float("nan")), "fc.weight is not finite"),
        (lambda t: t["embed_tokens.weight"].view(-1)[3:4].fill_(float("inf")), "embed_tokens.weight is not finite"),
        (put("fc.weight", lambda fc: fc[:, :16].clone()), "fc.weight reads 2 aux states, the engines would build 3"),
        (
            put("lm_head.weight", lambda head: torch.zeros(12, 8)),
            "lm_head.weight has shape [12, 8], config.json says [6, 8]",
        ),
        (put("norm.weight", lambda norm: norm.to(torch.int32)), "norm.weight is torch.int32"),
    ],
)
def test_a_broken_tensor_is_named(published, change, said):
    problems = inspect(published(change_tensors=change)).faults()
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 4, 8]),
            "eagle_config's [1, 4, 8] are the inputs of [2, 5, 9], but vLLM reads [1, 4, 8]",
        ),
        (
            lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 5, 9]),
            "eagle_config's [2, 5, 9] are",
        ),
        (lambda c: c.pop("eagle_aux_hidden_state_layer_ids"), "eagle_config's [1, 4, 8] is not read"),
        (lambda c: c.pop("eagle_config"), "without eagle_config's list"),
        (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), "use_aux_hidden_state"),
        (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers is 2"),
        (lambda c: c.update(model_type="kimi_k2"), 'model_type is "kimi_k2"'),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is true"),
        (lambda c: c.update(rope_theta=5e4), "rope_theta 50000 with rope_scaling None"),
        (lambda c: c["rope_parameters"].update(rope_type="linear", factor=2.0), "contradict each other"),
        (lambda c: c.pop("draft_vocab_size"), "draft_vocab_size is missing"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
        (lambda c: c.update(architectures=[]), "architectures"),
        (lambda c: c.pop("hidden_size"), "hidden_size"),
        (lambda c: c.update(vocab_size="12"), "vocab_size is '12'"),
        (lambda c: c.update(draft_vocab_size=12), "lm_head.weight has shape [6, 8], config.json says [12, 8]"),
        (lambda c: c.update(num_attention_heads=4), "q_proj.weight has shape"),
        (lambda c: c.update(hidden_size=16), "has shape"),
    ],
)
def test_a_broken_config_is_named(published, change, said):
    problems = inspect(published(change)).faults()
    assert any(said in problem for problem in problems), problems


def test_four_layers_for_an_fc_of_three_states(published):
    def four(config):
        config[IDS] = [1, 2, 5, 9]
        config["eagle_config"][IDS] = [0, 1, 4, 8]

    faults = inspect(published(four)).faults()
    assert "fc.weight reads 3 aux states, the engines would build 4: set num_aux_hidden_states to 3" in faults
    assert f"{IDS} names 4 aux layers for an fc of 3 states" in faults


def test_a_half_weight_file_is_refused(published):
    file = published() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "model.safetensors cannot be read" in inspect(file.parent).faults()[0]


def test_a_half_config_is_the_users_error(published):
    file = published() / "config.json"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"config\.json"):
        inspect(file.parent)


@pytest.mark.parametrize("lost", ["factor", "original_max_position_embeddings"])
def test_a_yarn_scaling_that_lacks_a_number_is_named(published, lost):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    del scaling[lost]
    (fault,) = inspect(published(lambda c: c.update(rope_scaling=scaling))).faults()
    assert "needs factor and original_max_position_embeddings" in fault


def test_a_layer_beyond_num_hidden_layers_is_named(published):
    findings = inspect(published(change_tensors=lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)})))
    assert "layers.1.mlp.up_proj.weight: vLLM has no such parameter" in levels(findings, "error")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_mla_draft_under_a_model_type_without_mla(published, tmp_path, model_type):
    mla = write_draft(tmp_path / "mla", form="mla")
    (fault,) = inspect(published(lambda c: c.update(model_type=model_type), None, mla)).faults()
    assert f'model_type is "{model_type}"' in fault and 'write "kimi_k2"' in fault


@pytest.mark.parametrize(
    ("config", "tensors", "servable", "said"),
    [
        (None, lambda t: t.pop("fc.weight"), [], "fc.weight is missing: engines keep random values"),
        (None, lambda t: t.pop("lm_head.weight"), [], "lm_head.weight is missing: vLLM takes the first rows"),
        (None, lambda t: t.pop("d2t"), [], "d2t is missing: engines take draft ids for target ids"),
        (None, lambda t: t.pop("t2d"), [VLLM, SGLANG], "no t2d: no engine reads it"),
        (None, lambda t: t.pop("embed_tokens.weight"), [VLLM, SGLANG], "both engines take the target's"),
        (None, lambda t: t.update(d2t=KEPT.clone()), [], "it looks like absolute ids"),
        (None, lambda t: t.update(d2t=t["d2t"].int()), [VLLM, SGLANG], "d2t is torch.int32"),
        (None, lambda t: t["t2d"].logical_not_(), [], "contradict"),
        (None, lambda t: t.update(odd=torch.zeros(1)), [SGLANG], "odd: vLLM has no such parameter"),
        (None, lambda t: t["norm.weight"].fill_(float("nan")), [], "norm.weight is not finite"),
        (None, lambda t: t.update({"norm.weight": torch.zeros(3)}), [], "norm.weight has shape [3]"),
        (lambda c: c.update(num_hidden_layers=2), None, [], "num_hidden_layers is 2, but only layers [0] are stored"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), None, [VLLM], 'rename it to "LlamaForCausalLMEagle3"'),
        (lambda c: c.update(architectures=["BertModel"]), None, [], "expected one EAGLE-3 architecture"),
        (lambda c: c.pop("draft_vocab_size"), None, [], "lm_head.weight has shape [6, 8], config.json says [12, 8]"),
        (lambda c: c.update(tie_word_embeddings=True), None, [VLLM], "SGLang would use the embedding as the head"),
        (lambda c: c["eagle_config"].update(use_aux_hidden_state=False), None, [], "engines would feed the last state"),
        (lambda c: c.pop("rms_norm_eps"), None, [VLLM, SGLANG], "no rms_norm_eps: engines take transformers' default"),
        (lambda c: c.pop("hidden_size"), None, [], "hidden_size"),
    ],
)  # fmt: skip
def test_what_others_leave_out_or_break(published, config, tensors, servable, said):
    found = inspect(published(config, tensors))
    assert said in "\n".join(map(str, found)) and found.servable() == servable, list(map(str, found))


def test_a_full_vocabulary_may_take_the_targets_head(published, tmp_path):
    full = write_draft(tmp_path / "full", kept=torch.arange(12))
    found = inspect(published(lambda c: c.update(draft_vocab_size=None), lambda t: t.pop("lm_head.weight"), full))
    assert found.servable() == [VLLM, SGLANG] and "no lm_head.weight: both engines take the target's" in levels(
        found, "note"
    )
    save_file(load_file(full / "model.safetensors") | {"d2t": torch.zeros(12).long()}, full / "model.safetensors")
    assert inspect(full).servable() == [SGLANG]


def test_an_mla_draft_under_the_targets_own_model_type(published, tmp_path):
    mla = write_draft(tmp_path / "mla", form="mla")
    found = inspect(published(lambda c: c.update(model_type="deepseek_v3"), None, mla))
    assert found.servable() == [SGLANG] and "own MTP layer" in levels(found, "error")


def test_transformers_5_alone(published):
    def change(config):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e4}
        config.pop("rope_theta"), config.pop("rope_scaling")

    assert "transformers 4 would take theta 10000, not 50000" in levels(inspect(published(change)), "note")


class Code:
    """A pickle that runs something when it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_pickled_weights_are_read_without_running_them(published):
    folder = published()
    tensors = load_file(folder / "model.safetensors")
    pickle_weights(folder)
    findings = inspect(folder)
    assert findings.servable() == [VLLM, SGLANG] and "safetensors is safer" in levels(findings, "note")
    for wrong in (tensors | {"code": Code()}, [tensors], {"state": tensors}):
        torch.save(wrong, folder / "pytorch_model.bin")
        (fault,) = inspect(folder).faults()
        assert "pytorch_model.bin cannot be read: " in fault and "\n" not in fault
    (folder / "pytorch_model.bin").write_bytes(b"half")
    assert "pytorch_model.bin cannot be read" in levels(inspect(folder), "error")


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
    assert found.servable() == [VLLM] and "none of its has q_norm, k_norm" in levels(found, "unsupported")


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


def test_the_speculators_layout(ours, tmp_path):
    write_speculators(tmp_path / "other", ours, "some/target", 3)
    found = inspect(tmp_path / "other")
    assert found.servable() == [VLLM] and "speculators format" in levels(found, "unsupported")


def test_the_switch_prints_a_line_a_finding_and_a_verdict(ours, published):
    code, out, _ = run_here("04", "--config", DEMO, "--check-export", ours)
    assert code == 0 and out.splitlines()[-1] == f"{ours}: servable with vLLM and SGLang"
    folder = published(change_tensors=lambda t: t.pop("fc.weight"))
    code, out, _ = run_here("04", "--config", DEMO, "--check-export", folder)
    assert code == 2 and out.splitlines()[0].startswith("error        vLLM, SGLang  fc.weight is missing")
    assert out.splitlines()[-1] == f"{folder}: not servable"
    code, _, err = run_here("04", "--config", DEMO, "--check-export", folder / "nowhere")
    assert code == 2 and "no such file" in err
