"""The ready configs: each loads, says what each of its keys means, and fits its target's protocol."""

import re
import tomllib
from dataclasses import replace

import pytest

from common.pipeline.command_line import Settings, load_settings
from common.servers.commands import generation_command
from common.target.protocol import load_protocol
from common.target.sizes import read_sizes
from tests.support.stages import ROOT

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
KIMI = [name for name in CONFIGS if name.startswith("kimi")]
COMMENTED = set(CONFIGS) - {"demo"}


def whole(name: str) -> Settings:
    return load_settings(["--config", str(CONFIGS[name])], "a test", ("target", "generate"))


def test_the_configs_that_are_promised():
    assert set(CONFIGS) >= {"kimi-k2.5", "kimi-k2.5-nvfp4", "qwen3-8b", "deepseek-r1-distill", "demo"}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_aux_layers_and_limits_fit_together(name, tmp_path):
    f = whole(name)
    sizes = read_sizes(replace(f.target, model=str(tmp_path / "not-there")), f.shipped_config)
    layers = sizes.aux_layers(f.extract.aux_layers)
    if f.extract.aux_layers:
        assert layers == (2, sizes.layers // 2, sizes.layers - 3)
    assert f.dataset.draft_vocab_size <= sizes.vocab_size
    assert f.dataset.sample_tokens <= f.train.pack_tokens
    assert f.generate.max_tokens <= f.generate.context_tokens
    assert f.forecast.weights_gb > 0
    assert f.forecast.active_b > 0
    assert f.train.packs_per_step % f.forecast.assume_gpus == 0


@pytest.mark.parametrize("name", sorted(COMMENTED))
def test_every_key_says_what_it_means(name):
    """On its line, above it, or above it for the key that it completes (think_open, think_open_id)."""
    table, before, silent = "", "", []
    for line in CONFIGS[name].read_text("utf-8").splitlines():
        table = line.split(" #")[0] if line.startswith("[") else table
        key = re.match(r"(\w+) = ", line)
        explained = "#" in line or ("#" in before and (before.startswith("#") or line.startswith(before.split(" ")[0])))
        if key and not explained and table != "[forecast]" and not line.endswith("["):
            silent.append(f"{table} {key[1]}")
        before = line
    assert silent == []


@pytest.mark.parametrize("name", KIMI)
def test_kimi_configs_speak_the_protocol_of_the_real_vocabulary(name, kimi_folder, kimi):
    """The vendor's tokenizer files with the real 163,840 tokens; everything else as in the file."""
    target = replace(whole(name).target, model=str(kimi_folder))
    protocol = load_protocol(target)
    assert (protocol.think_open, protocol.think_close, protocol.end) == (163606, 163607, 163586)
    assert protocol.prompt_tail(True)[-1] == 163606 and protocol.prompt_tail(False)[-2:] == [163606, 163607]
    assert protocol.think_open_in_prompt(protocol.prompt_ids([{"role": "user", "content": "hi"}]))


def test_both_kimi_checkpoints_have_one_shape():
    one, other = (CONFIGS[name].with_suffix(".config.json").read_text("utf-8") for name in KIMI)
    assert one == other


def test_nvfp4_differs_from_int4_where_the_checkpoint_does():
    """Same tokens, layers and draft: what differs is the checkpoint, its size and the number of servers."""
    one, other = (tomllib.loads(CONFIGS[name].read_text("utf-8")) for name in ("kimi-k2.5", "kimi-k2.5-nvfp4"))
    differing = {f"{table}.{key}" for table in one for key in one[table] if one[table][key] != other[table].get(key)}
    assert differing == {
        "target.model", "target.tensor_parallel", "generate.base_urls", "generate.concurrency",
        "extract.extract_urls", "forecast.weights_gb",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(COMMENTED))
def test_the_server_command_is_whole(name):
    f = whole(name)
    command = generation_command(f.target, 8000, f.generate.context_tokens)
    assert command.startswith(f"vllm serve {f.target.model} --port 8000") and "--reasoning-parser" in command
