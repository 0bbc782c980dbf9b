"""The rehearsal's steps with the tiny Kimi-K2.5: its config, vocabulary, model class, an MLA draft."""

from functools import partial
from pathlib import Path

import torch
from transformers import Kimi_K25ForConditionalGeneration

from tests.end_to_end.check_draft import (
    check_acceptance,
    decode,
    held_out_records,
    inside_replies,
    row_of,
    same_outputs,
)
from tests.end_to_end.check_extraction import CHUNK, CHUNKED, SAME, check_states, chunks_mla, extraction_server, left
from tests.end_to_end.check_generate import check_generate, check_parser_off
from tests.end_to_end.check_server import check_chat, check_kill
from tests.end_to_end.offline_walk import reply_walks
from tests.end_to_end.pipeline_run import Run, as_flags
from tests.end_to_end.server import printed_server
from tests.end_to_end.state_distance import run_distance
from tests.end_to_end.tiny_kimi import build_checkpoint
from tests.support.stages import ROOT

CONFIG, TEACH_STEPS = ROOT / "configs/kimi-k2.5.toml", 200
# The tiny Kimi was taught other questions: its greedy answers to questions of the taught kind are nearly all the same.
QUESTIONS, SAMPLES, MAX_TOKENS = "configs/demo_questions.jsonl", 300, 64
AUX = (1, 3, 5)
SHARE = 0.5  # of the tokens must have equal states up to rounding; in the others the router may choose other experts
# The servers' type where replies, states and drafts are compared token by token. In bf16, rounding decides between
# experts whose scores are tied, and rounding depends on how many tokens a step verifies. CPU_MLA: vLLM's AMX kernels
# compute in bf16 only.
EXACT = {"dtype": "float32", "attention_backend": "CPU_MLA"}
KS = range(1, 8)
MAIN_K = 3
SERVED = {"tensor_parallel": 1}  # the config says 8 GPUs; everything else about the server is as the config says
GREEDY = {"temperature": 0, "top_p": 1, "max_tokens": MAX_TOKENS, "context_tokens": 2048, "concurrency": 16}
EXTRACT = {"aux_layers": AUX, "max_tokens_per_sample": 1024, "extract_concurrency": 16}
# So small a model gives its own tokens low probabilities: 02's check must take that for on policy.
CONSTANTS = {"common.extraction.on_policy.MAX_NLL": 6.0}
DATASET = {"draft_vocab_size": 2048, "holdout_share": 0.2, "sample_tokens": 1024}
DRAFT = {"form": "mla", "intermediate_size": 256, "attention_heads": 4, "key_value_heads": 4}
TRAINING = {"epochs": 6, "learning_rate": 2e-3, "packs_per_step": 1, "pack_tokens": 1024, "eval_every": 100}


def folder(rehearsal):
    return rehearsal.work / "tiny-kimi"


def config(rehearsal):
    """A copy of configs/kimi-k2.5.toml, without Kimi's config.json beside it: the tiny Kimi has other sizes."""
    path, text = rehearsal.work / "kimi-k2.5.toml", CONFIG.read_text()
    if not path.exists() or path.read_text() != text:  # another step may be reading it
        path.write_text(text)
    return path


def the_run(rehearsal, name: str = "kimi") -> Run:
    return Run(rehearsal.work / name, config(rehearsal), CONSTANTS, model=folder(rehearsal))


def build(rehearsal) -> None:
    config(rehearsal)
    build_checkpoint(folder(rehearsal), train_steps=TEACH_STEPS)


def chat(rehearsal) -> None:
    """One server: what the pipeline counts on in chats, 01b with several settings, the samples to train on."""
    run, check, model = the_run(rehearsal), rehearsal.check, folder(rehearsal).resolve()
    printed = run("01", "--print-server-command", **SERVED, **GREEDY)
    with printed_server(printed, rehearsal.work / "kimi-chat.log", *as_flags(EXACT)) as server:
        check_chat(check, server, model)
        check_generate(check, server.base_url + "/v1", model, rehearsal.work / "kimi-check")
        urls = server.base_url + "/v1"
        run("01", "--n", SAMPLES, dataset=QUESTIONS, base_urls=urls, shuffle_seed=-1, **GREEDY)
        check_kill(check, server)
    counts = run.manifest("01_synthetic").counts
    check(f"Kimi: {SAMPLES} samples", counts["done"] == SAMPLES and counts["failed"] == 0, counts["done"])
    distinct = len({tuple(record["output_ids"]) for record in run.records()})
    check("Kimi: the samples differ", distinct > SAMPLES / 4, f"{distinct} distinct")
    rehearsal.note("Kimi samples", f"{counts['done']}, {distinct} distinct, {counts['output_tokens']:,} tokens written")


def parser_off(rehearsal) -> None:
    run, model = the_run(rehearsal), folder(rehearsal).resolve()
    printed = run("01", "--print-server-command", "--reasoning-parser", "", **SERVED, **GREEDY)
    with printed_server(printed, rehearsal.work / "kimi-parser-off.log") as server:
        check_parser_off(rehearsal.check, server.base_url + "/v1", model, rehearsal.work / "kimi-check-off")


def extract(rehearsal) -> None:
    """States at tensor-parallel size 1 in float32 and 2 in bf16, compared with transformers' and with each other."""
    check, spool = rehearsal.check, rehearsal.spool
    runs = {1: the_run(rehearsal), 2: the_run(rehearsal, "kimi-tp2")}
    text = [id for record in runs[1].records() for id in record["prompt_ids"] + record["output_ids"]]
    link = runs[2].folder / "01_synthetic"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to((runs[1].folder / "01_synthetic").resolve())

    def reference(dtype: torch.dtype, prompts: list[list[int]]) -> list[torch.Tensor]:
        states = reference_states(folder(rehearsal), prompts, dtype)  # [layers + 1, all T, H]
        return list(states.split([len(ids) for ids in prompts], dim=1))

    flags = {1: as_flags(EXACT), 2: CHUNKED if chunks_mla() else ()}
    references = {1: partial(reference, torch.float32), 2: partial(reference, torch.bfloat16)}
    for size, run in runs.items():
        log = rehearsal.work / f"kimi-extract-tp{size}.log"
        with extraction_server(run, spool, log, *flags[size], tensor_parallel=size, **EXTRACT) as server:
            check_states(check, f"Kimi TP {size}", server, run, spool, text, AUX, references[size], share=SHARE)
            urls = {"spool": spool, "extract_urls": server.base_url + "/v1"}
            run("02", **EXTRACT, **urls)
            check(f"Kimi TP {size}: the spool is empty after 02", left(spool) == [], left(spool))
        counts = run.manifest("02_hidden").counts
        rehearsal.note(f"Kimi TP {size} on policy", f"{counts['nll']:.3f} nat/token, first choice {counts['top1']:.1%}")
    how = f"in chunks of {CHUNK}" if chunks_mla() else "whole: without AMX vLLM's CPU build does not chunk MLA"
    rehearsal.note("Kimi prefill", how)
    off, compared = run_distance(runs[2], runs[1], SHARE)
    check("Kimi: TP 2 stores what TP 1 stores", off < SAME, f"{compared} sequences, {off:.4f} apart")


def reference_states(model: Path, prompts: list[list[int]], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """transformers' states, the prompts end to end: [layers + 1, all T, H]; index k is the input of layer k.

    Read by hooks, since the last entry of transformers' own `hidden_states` is the state after the final norm.
    """
    text = Kimi_K25ForConditionalGeneration.from_pretrained(model, dtype=dtype).eval().model.language_model
    states: list[torch.Tensor] = []
    text.layers[0].register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0][0]))
    for layer in text.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: states.append(output[0]))
    by_prompt = []
    for ids in prompts:
        states.clear()
        with torch.no_grad():
            text(input_ids=torch.tensor([ids]))
        by_prompt.append(torch.stack(states).float())
    return torch.cat(by_prompt, dim=1)


def train(rehearsal) -> None:
    run = the_run(rehearsal)
    run("03", **DATASET)
    run("04", **DRAFT, **TRAINING)
    counts = run.manifest("04_draft").counts
    rehearsal.note("Kimi training", f"{counts['tokens']:,} tokens, {counts['seconds']:.0f} s")


def serve(rehearsal) -> None:
    """The MLA draft in vLLM at every k. At MAIN_K each reply also runs alone, to compare its drafts one by one with the
    offline walk."""
    run, check = the_run(rehearsal), rehearsal.check
    export = run.folder / "04_draft" / "export"
    records = held_out_records(run)
    prompts = [record["prompt_ids"] for record in records]
    engines = [None, *({"draft": str(export.resolve()), "k": k, "alone": k == MAIN_K} for k in KS)]
    plain, *drafted = decode(
        run, "serve", folder(rehearsal), prompts, MAX_TOKENS, engines, language_model_only=True, **EXACT
    )
    walks = run.manifest("04_draft").counts["acceptance"]["walk"]
    for k, engine in zip(KS, drafted, strict=True):
        seen = f"{int(engine['drafts'])} drafts, {int(sum(engine['accepted']))} accepted"
        check(f"Kimi k={k}: drafts through the MLA path", min(engine["drafts"], *engine["accepted"]) > 0, seen)
        same = same_outputs(plain["outputs"], engine["outputs"])
        row = f"{row_of(engine, walks[str(k)])}; {same} outputs identical"
        rehearsal.note(f"Kimi acceptance, {len(records)} held-out replies, k={k}", row)

    main = drafted[MAIN_K - 1]
    # Equality is not asked for here: where experts are tied, rounding chooses other experts, which moves the logits by
    # much. SmolLM2, which has no experts, is held to equality.
    same = same_outputs(plain["outputs"], main["outputs"])
    check(
        "Kimi: output with and without the draft mostly the same", same > len(prompts) / 2, f"{same} of {len(prompts)}"
    )
    engine, offline = inside_replies(main["alone"], records, reply_walks(run, MAIN_K), MAIN_K)
    check("Kimi: most replies by themselves are the recorded ones", engine["drafts"] > main["drafts"] / 2)
    row = check_acceptance(check, f"Kimi k={MAIN_K}, inside equal replies", engine, offline)
    rehearsal.note(f"Kimi acceptance inside equal replies, k={MAIN_K}", row)
