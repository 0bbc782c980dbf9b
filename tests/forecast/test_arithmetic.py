"""The forecast against what it predicts: weights, and the memory of a real training step."""

import dataclasses
import shutil

import pytest
import torch

from common.dataset.shard_layout import bytes_per_token
from common.draft.network import Draft
from common.forecast import arithmetic
from tests.support.stages import only_error, run_here
from tests.support.step_memory import CASES, KIMI, MLA, SMALL, measured, predicted

FORMS = {
    "llama": SMALL,
    "options": dataclasses.replace(SMALL, norm_before_fc=True, fc_norm=True),
    "mla": CASES["mla"][0],
    "mla without low-rank queries": dataclasses.replace(SMALL, form="mla", **MLA | {"q_lora_rank": 0}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_draft(form):
    with torch.device("meta"):
        draft = Draft(FORMS[form], torch.empty(4096, SMALL.hidden_size))
    assert arithmetic.trained_weights(FORMS[form]) == sum(p.numel() for p in draft.parameters() if p.requires_grad)


@pytest.mark.parametrize("case", CASES)
def test_memory_is_within_15_percent_of_a_measured_step(case):
    ratio = sum(predicted(*CASES[case]).values()) / measured(*CASES[case])
    assert 0.85 < ratio < 1.15, ratio


def test_ranks_share_what_fsdp_shares():
    one, ddp, fsdp = (arithmetic.training_memory(KIMI, 8192, 7800, 7, *how) for how in ((1,), (8, "ddp"), (8, "fsdp")))
    assert ddp["master"] == one["master"] == 8 * fsdp["master"] and "buckets" not in one | fsdp
    assert ddp["activations"] == fsdp["activations"] and "gathered" in fsdp
    assert sum(fsdp.values()) < sum(ddp.values())


def test_the_published_figures_for_kimi():
    """57,344 bytes of states a token, 2.35 TB for 10,000 x 4,096, about 40 GFLOP a token, 1.06 to 1.2 B weights."""
    assert 10_000 * 4096 * bytes_per_token(7168, 3) == pytest.approx(2.35e12, rel=0.01)
    assert arithmetic.sample_flops(KIMI, 200, 3896, 7) / 4096 == pytest.approx(40e9, rel=0.1)
    assert 1.06e9 <= arithmetic.trained_weights(KIMI) <= 1.2e9
    kimi = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert arithmetic.cache_bytes(kimi, 61, 8) == 2 * 61 * 576  # on every GPU, whatever their number
    gpus = arithmetic.GPUS
    assert arithmetic.replies_that_fit(gpus["H100 SXM"], 8, 2000, 595e9, 70272) < 0
    assert arithmetic.replies_that_fit(gpus["RTX PRO 6000 Blackwell"], 8, 2000, 595e9, 70272) > 64


# ---- dry runs ----

CONFIGS = ("kimi-k2.5", "kimi-k2.5-nvfp4", "qwen3-8b", "deepseek-r1-distill", "demo")


@pytest.mark.parametrize("config", CONFIGS)
def test_every_stage_plans_every_config_from_nothing(config, tmp_path, monkeypatch):
    """No target, no run folder, no hub: each stage prints the same plan of the whole run."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub"))
    plans = set()
    for stage in ("01", "02", "03", "04") if config == "demo" else ("02", "03", "04"):
        flags = ("--config", f"configs/{config}.toml", "--run-dir", tmp_path / "run", "--n", 1000, "--dry-run")
        code, out, err = run_here(stage, *flags)
        assert code == 0, err
        for said in ("1,000 samples", "02_hidden", "activations", "FSDP2" if "kimi" in config else "one GPU", "B200"):
            assert said in out
        plans.add(out[out.index("the whole run") :])
    assert len(plans) == 1 and not (tmp_path / "run").exists()


def test_generation_is_planned_without_tokenizer_or_questions(tmp_path):
    code, out, err = run_here("01", "--run-dir", tmp_path / "run", "--dry-run", "--assume-output-tokens", 500)
    assert code == 0, err
    assert "not on this machine yet: no tokenizer at 'moonshotai/Kimi-K2.5'" in out and "500 reply" in out


def test_measured_lengths_beat_assumed_ones(tiny_run):
    code, out, err = run_here("03", "--config", "configs/demo.toml", "--run-dir", tiny_run, "--dry-run")
    assert code == 0, err
    assert "lengths of the 10 samples in" in out and "10 samples" in out and "shards" in out


def test_sizes_of_the_config_are_asserted(tmp_path, tiny_run):
    from tests.support.stages import ROOT

    shutil.copy(ROOT / "configs/demo.toml", tmp_path)
    text = (ROOT / "configs/demo.config.json").read_text().replace('"num_hidden_layers": 30', '"num_hidden_layers": 31')
    (tmp_path / "demo.config.json").write_text(text)
    code, _, err = run_here("02", "--config", tmp_path / "demo.toml", "--run-dir", tiny_run)
    assert code == 2 and "num_hidden_layers is 31 in" in only_error(err) and "30 in config.json" in err


def rows(out: str) -> dict[str, str]:
    """The tables that a dry run prints, by the first word of each line."""
    return {line.split()[0]: line for line in out.splitlines() if line.strip()}


def test_a_dry_run_of_04_reads_what_03_used(run_copy):
    """The vocabulary decides the memory of 04, the cut of the samples its arithmetic; neither is a flag of 04."""
    folder, printed = run_copy("01_synthetic", "02_hidden"), []
    for flags in ((), ("--draft-vocab-size", 1024, "--sample-tokens", 64)):
        code, _, err = run_here("03", "--config", "configs/demo.toml", "--run-dir", folder, *flags)
        assert code == 0, err
        code, out, err = run_here("04", "--config", "configs/demo.toml", "--run-dir", folder, "--dry-run")
        assert code == 0, err
        printed.append(rows(out))
    before, after = printed
    assert "1,024 of 49,152" in after["vocabulary"]
    assert float(after["master"].split()[1]) < float(before["master"].split()[1])
    assert after["FLOPs"].split("training")[1] != before["FLOPs"].split("training")[1]


def test_the_disk_line_of_04_reads_what_02_used(run_copy):
    folder = run_copy("01_synthetic", "02_hidden", "03_dataset")
    path = folder / "02_hidden/manifest.json"
    path.write_text(path.read_text().replace('"store_dtype": "bf16"', '"store_dtype": "fp8"'))
    code, out, err = run_here("04", "--config", "configs/demo.toml", "--run-dir", folder, "--dry-run")
    assert code == 0, err
    assert f"tokens x {bytes_per_token(576, 3, 'fp8'):,} bytes" in rows(out)["02_hidden"]
