"""A Kimi-K2.5 checkpoint in everything but size: the vendor's files, names and config form, 25 million weights.

Real: the vocabulary and its ids, the chat form, the architecture (MLA with Kimi's own ranks and head sizes, routed and
shared experts, the first layer dense, yarn), the nested config, the tensor names, the sharded index. Small: hidden
size, layers, experts. Random weights soon loop when decoded greedily and are noise when sampled; `train_steps` teaches
the model the chat form and some English first, so that what it writes has a shape.

    python -m tests.end_to_end.tiny_kimi FOLDER [--train-steps 200] [--seed 0]

It has no vision tower: serve it with `--language-model-only`.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support.kimi_vocabulary import add_fast_tokenizer, build_vocabulary, write_json

KIMI_STD = 0.02  # of the initial weights
LEARNER_STD = 0.1  # Kimi's is for a width of 7168; at 64 it learns half as fast
SHARDS = 2  # more than one, because the vendor's 64 make readers go through the index


@dataclass(frozen=True)
class Sizes:
    """What differs from Kimi. Heads, experts' width and the dense width divide by 2: tensor parallel 2 works."""

    hidden: int = 64
    layers: int = 6
    heads: int = 4
    dense_width: int = 128
    expert_width: int = 32
    experts: int = 8
    experts_per_token: int = 2
    q_rank: int = 64


def text_config(sizes: Sizes) -> dict:
    """Kimi's `text_config` as the vendor writes it: model_type "kimi_k2", `rope_theta` and `rope_scaling` apart."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163_840,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.dense_width,
        "moe_intermediate_size": sizes.expert_width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": sizes.experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": KIMI_STD,
        "max_position_embeddings": 262_144,
        "rope_theta": 50_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 163_584,
        "eos_token_id": 163_585,
        "dtype": "bfloat16",
    }


def model_config(sizes: Sizes) -> dict:
    """The outer config.json: text settings nested, a token vision tower, ids of the media tokens."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 163_584,
        "eos_token_id": 163_585,  # generation_config.json says 163586: as with the vendor, only that one stops a turn
        "pad_token_id": 163_839,
        "media_placeholder_token_id": 163_605,
        "text_config": text_config(sizes),
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
        },
    }


PREPROCESSOR_CONFIG = {
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 16_384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def build_checkpoint(folder: Path, seed: int = 0, sizes: Sizes | None = None, train_steps: int = 0) -> None:
    """Write a folder that vLLM serves and transformers loads. The same arguments give the same files on one machine."""
    sizes = sizes or Sizes()
    build_vocabulary(folder)
    add_fast_tokenizer(folder)
    write_json(folder / "config.json", model_config(sizes))
    write_json(folder / "generation_config.json", {"max_length": 262_144, "eos_token_id": 163_586})
    write_json(folder / "preprocessor_config.json", PREPROCESSOR_CONFIG)

    torch.manual_seed(seed)
    start = {"model_type": "deepseek_v3", "initializer_range": LEARNER_STD if train_steps else KIMI_STD}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**text_config(sizes) | start))
    if train_steps:
        from tests.end_to_end.tiny_kimi_training import teach

        model.lm_head.weight.data.normal_(std=KIMI_STD)  # tokens that training never shows keep logits near 0
        teach(model, folder, train_steps)
    save_weights(vendor_tensors(model), folder)


def vendor_tensors(model: DeepseekV3ForCausalLM) -> dict[str, torch.Tensor]:
    """The weights under the vendor's names and types: bf16, but the router's correction bias, which stays f32.

    transformers keeps a layer's experts stacked, gate and up projection in one: [E, 2*W, H]. Kimi's files hold one
    matrix an expert and projection. Done by hand: `save_pretrained`'s own reverse mapping misnames Kimi's layers.
    """
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for e, gate_up in enumerate(value):  # [2*W, H]
                gate, up = gate_up.chunk(2)
                tensors[f"{stem}{e}.gate_proj.weight"], tensors[f"{stem}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            tensors |= {f"{stem}{e}.down_proj.weight": down for e, down in enumerate(value)}  # [H, W]
        else:
            tensors[name] = value
    return {
        f"language_model.{name}": value.to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        for name, value in tensors.items()
    }


def save_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write SHARDS safetensors files and the index that says which tensor is in which."""
    names = list(tensors)
    where = {
        name: f"model-{i * SHARDS // len(names) + 1:05d}-of-{SHARDS:06d}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(where.values())):
        part = {name: tensors[name].contiguous().clone() for name in names if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--train-steps", type=int, default=0, help="0 leaves the weights random; 200 take about a minute"
    )
    args = parser.parse_args()
    start = time.monotonic()
    build_checkpoint(args.folder, seed=args.seed, train_steps=args.train_steps)
    print(f"{args.folder}: tiny Kimi-K2.5 in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
