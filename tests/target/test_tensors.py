"""The head and the norm as read make the target's own logits, whatever a family adds or multiplies."""

import pytest
import torch
from torch.nn.functional import rms_norm

from common.pipeline.settings import Target
from common.target.sizes import read_sizes
from common.target.tensors import read_tensors

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 20, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0, "num_local_experts": 2, "num_experts_per_tok": 1},
    "hyperclovax": {"logits_scaling": 0.5},
    "falcon_h1": {"lm_head_multiplier": 0.3, "mamba_chunk_size": 4} | MAMBA,
    "minicpm3": {"dim_model_base": 4} | MLA,
    "gemma": {},
    "gemma2": {"final_logit_softcapping": None},
    "gemma3_text": {},
    "qwen3_next": LINEAR | MOE,
    "qwen3_5_text": LINEAR,
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_tensors_as_read_make_the_models_own_logits(tmp_path, family):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    decoder, kept = model.get_decoder(), {}
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.final_layernorm

    def keep(module, args, kwargs):
        kept["last"] = args[0] if args else kwargs["hidden_states"]

    norm.register_forward_pre_hook(keep, with_kwargs=True)
    wanted = model(torch.arange(3, 12)[None], use_cache=False).logits
    model.save_pretrained(tmp_path)
    target = Target(str(tmp_path))
    tensors = read_tensors(target, "norm", "lm_head", "embedding")
    normed = rms_norm(kept["last"], tensors["norm"].shape, tensors["norm"], read_sizes(target).eps)
    torch.testing.assert_close(normed @ tensors["lm_head"].T, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(tensors["embedding"], model.get_input_embeddings().weight)
