"""Every option of every stage by name. Adding one needs a reason, stated in the commit that changes this file: a
constant beside its use, a merged setting or a better default is preferred. Removing one needs none.
"""

import os
import re
from dataclasses import fields

import pytest

from common.pipeline.settings import SECTIONS
from tests.support.stages import SCRIPTS, STAGE_SECTIONS, run_here, run_process

EVERY_STAGE = "config run_dir n dry_run fresh device"
SWITCHES = {
    "01": "probe print_server_command part",
    "02": "verify print_server_command part",
    "03": "inspect",
    "04": "follow export_only check_export",
}
OPTIONS = {
    "target": """
        model revision tokenizer trust_remote_code think_open think_open_id think_close think_close_id
        end_token end_token_id thinking_argument reasoning_parser tensor_parallel server_flags
    """,
    "questions": "dataset split shuffle_seed streaming turns system_prompt",
    "generate": """
        engine base_urls served_model concurrency thinking thinking_budget temperature top_p max_tokens
        context_tokens seed repeats request_timeout_s outage_s batch_size
    """,
    "extract": """
        extractor extract_urls aux_layers max_tokens_per_sample store_dtype spool extract_concurrency
        shard_gib window batch_tokens
    """,
    "dataset": "draft_vocab_size holdout_share sample_tokens",
    "draft": "form eagle intermediate_size attention_heads key_value_heads head_dim",
    "train": """
        epochs learning_rate optimizer packs_per_step pack_tokens unrolled_steps eval_steps step_weight seed
        precision parallel compile warm_start compare track eval_every
    """,
    "serving": "export_format serve_eval without_draft questions eval_concurrency eval_temperature eval_max_tokens",
    "forecast": """
        active_b weights_gb assume_output_tokens assume_gpus assume_utilisation assume_bandwidth
        assume_disk_gb_s
    """,
}
AT_MOST = 92


@pytest.mark.parametrize("stage", sorted(SCRIPTS))
def test_a_stage_has_these_flags_and_no_other(stage):
    code, out, err = run_here(stage, "--help")
    assert code == 0, err
    flags = [flag.replace("-", "_") for flag in re.findall(r"^  --([\w-]+)", out, re.MULTILINE)]
    sections = [name for section in STAGE_SECTIONS[stage] for name in OPTIONS[section].split()]
    assert flags == [*EVERY_STAGE.split(), *SWITCHES[stage].split(), *sections]
    assert len(flags) == len(set(flags)), "two sections of one stage share a flag, which would set both"


def test_a_toml_has_these_keys_and_no_other():
    assert {name: [f.name for f in fields(cls)] for name, cls in SECTIONS.items()} == {
        name: text.split() for name, text in OPTIONS.items()
    }
    assert all(f.metadata["help"] for cls in SECTIONS.values() for f in fields(cls))


def test_there_are_few():
    """All keys of a TOML and all switches; the flags that every stage has come on top."""
    switches = {name for text in SWITCHES.values() for name in text.split()}
    assert sum(len(text.split()) for text in OPTIONS.values()) + len(switches) <= AT_MOST


def test_help_answers_at_once():
    """Half a second of computing; other processes may share the core, so that a clock says more than this costs."""
    before = os.times()
    assert run_process("04", "--help").returncode == 0
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5
