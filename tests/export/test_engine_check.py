"""The check of a draft's folder: our export passes; each way to break a copy, and what others leave out, is named."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.export.engine_check import inspect
from common.export.findings import CHECKED, SGLANG, VLLM
from tests.support.drafts import KEPT, levels, write_draft
from tests.support.stages import DEMO, ROOT, run_here


def test_the_versions_that_were_read_are_those_that_the_rehearsal_installs():
    """Fails when the pinned vLLM moves: read its eagle3 loaders again, correct the findings, then CHECKED."""
    pinned = (ROOT / "tests/end_to_end/constraints-vllm.txt").read_text()
    assert re.search(r"^vllm(?:-cpu)?==(\d+\.\d+)", pinned, re.MULTILINE)[1] == CHECKED[VLLM]


@pytest.mark.parametrize(
    "options",
    [{}, {"form": "mla"}, {"kept": torch.arange(12)}, {"fc_norm": True, "norm_output": True}],
)
def test_what_we_export_is_served_by_both(tmp_path, options):
    found = inspect(write_draft(tmp_path / "export", **options))
    assert found.servable() == [VLLM, SGLANG], levels(found, "error")
    assert "aux layers: inputs of [2, 5, 9], for both engines" in levels(found, "note")


def test_four_states_are_served(tmp_path):
    found = inspect(write_draft(tmp_path / "export", (1, 2, 5, 9), num_aux=4))
    assert found.servable() == [VLLM, SGLANG] and "4 aux states" in levels(found, "note")


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
            "eagle_config's [1, 4, 8] as inputs of [2, 5, 9], but vLLM reads [1, 4, 8]",
        ),
        (
            lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 5, 9]),
            "eagle_config's [2, 5, 9] as inputs of [3, 6, 10]",
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


def test_a_layer_beyond_num_hidden_layers_is_named(published):
    findings = inspect(published(change_tensors=lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)})))
    assert "layers.1.mlp.up_proj.weight: vLLM has no such parameter" in levels(findings, "error")


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


def test_a_draft_fed_by_the_last_state_alone_needs_no_fc(published):
    def last_state(config):
        config["eagle_config"]["use_aux_hidden_state"] = False

    findings = inspect(published(last_state, lambda tensors: tensors.pop("fc.weight")))
    assert findings.servable() == [VLLM, SGLANG]
    assert "engines feed the last state alone" in levels(findings, "note")


def test_the_switch_prints_a_line_a_finding_and_a_verdict(ours, published):
    code, out, _ = run_here("04", "--config", DEMO, "--check-export", ours)
    assert code == 0 and out.splitlines()[-1] == f"{ours}: servable with vLLM and SGLang"
    folder = published(change_tensors=lambda t: t.pop("fc.weight"))
    code, out, _ = run_here("04", "--config", DEMO, "--check-export", folder)
    assert code == 2 and out.splitlines()[0].startswith("error        vLLM, SGLang  fc.weight is missing")
    assert out.splitlines()[-1] == f"{folder}: not servable"
    code, _, err = run_here("04", "--config", DEMO, "--check-export", folder / "nowhere")
    assert code == 2 and "no such file" in err


@pytest.mark.parametrize(
    ("option", "bias", "named"),
    [
        (None, "midlayer.self_attn.q_proj.bias", "midlayer.self_attn.q_proj.bias without attention_bias"),
        (None, "midlayer.mlp.up_proj.bias", "midlayer.mlp.up_proj.bias without mlp_bias"),
        (None, "fc.bias", "fc.bias: the engines' fc has no bias"),
        ("attention_bias", None, "attention_bias is true, but no bias is stored"),
        ("mlp_bias", None, "mlp_bias is true, but no bias is stored"),
    ],
)
def test_biases_that_config_and_weights_disagree_on(published, option, bias, named):
    folder = published(
        lambda config: config.update({option: True} if option else {}),
        lambda tensors: tensors.update({bias: torch.ones(8)} if bias else {}),
    )
    findings = inspect(folder)
    assert findings.servable() == []
    assert named in levels(findings, "error")


@pytest.mark.parametrize("name", ["lm_head.weight", "norm.weight"])
def test_a_tensor_of_zeros_is_named(published, name):
    faults = inspect(published(change_tensors=lambda tensors: tensors[name].zero_())).faults()
    assert f"{name} is all zero: no draft token would be accepted" in faults
