"""The rehearsal's steps with SmolLM2: a real language model, a Llama-style draft, greedy throughout."""

import shutil
from array import array

import torch
from transformers import AutoModelForCausalLM

from common.dataset.stream import Stream
from common.extraction.local_extractor import LocalExtractor
from common.pipeline.settings import Extract, Target
from tests.end_to_end import kimi
from tests.end_to_end.check_draft import (
    check_acceptance,
    check_lossless,
    check_ties,
    decode,
    engine_length,
    held_out_records,
    row_of,
)
from tests.end_to_end.check_extraction import (
    CHUNKED,
    SAME,
    check_killed_server,
    check_refused,
    check_states,
    extraction_server,
    left,
)
from tests.end_to_end.pipeline_run import Run
from tests.end_to_end.server import printed_server
from tests.end_to_end.state_distance import run_distance
from tests.support.stages import ROOT

MODEL, CONFIG = "runs/smollm2-thinking", "configs/demo.toml"
SAMPLES, MAX_TOKENS = 120, 128
AUX, DEPTH = (2, 15, 27), 30
K = 3
EXACT = "float32"  # the servers' type where tokens are compared one by one: in bf16 every other reply meets a tie
# Without a thinking budget, whose closing token an engine without the budget would not write.
GREEDY = {"engine": "openai", "temperature": 0, "top_p": 1, "thinking_budget": 0, "max_tokens": MAX_TOKENS}
GREEDY |= {"context_tokens": 1024, "concurrency": 16}
DATASET = {"draft_vocab_size": 4096, "holdout_share": 0.2, "sample_tokens": 512}
TRAINING = {"pack_tokens": 512, "eval_every": 100}  # the demo's settings


def the_run(rehearsal, name: str = "smollm2") -> Run:
    return Run(rehearsal.work / name, CONFIG, model=MODEL)


def generate(rehearsal) -> None:
    run, check = the_run(rehearsal), rehearsal.check
    printed = run("01", "--print-server-command", "--reasoning-parser", "kimi_k2", **GREEDY)
    with printed_server(printed, rehearsal.work / "smollm2-generate.log", "--dtype", EXACT) as server:
        run("01", "--n", SAMPLES, base_urls=server.base_url + "/v1", **GREEDY)
        refuse_generation_server(rehearsal, server.base_url + "/v1")
    counts = run.manifest("01_synthetic").counts
    check(f"SmolLM2: {SAMPLES} samples", counts["done"] == SAMPLES and counts["failed"] == 0, counts["done"])
    check("SmolLM2: all with reasoning, from its field", counts["reasoning_fields"] == {"reasoning": SAMPLES})
    check("SmolLM2: all with the server's ids", counts["ids_from"] == {"server": SAMPLES})
    check("SmolLM2: all with the template's prompt", counts["other_prompt"] == 0)
    rehearsal.note("SmolLM2 samples", f"{counts['done']}, {counts['output_tokens']:,} tokens written")


def refuse_generation_server(rehearsal, url: str) -> None:
    """Stage 02 refuses a server that extracts nothing, and a server of another model."""
    flags = {"extract_urls": url, "spool": rehearsal.spool, "max_tokens_per_sample": 512}
    wrong = copy_of(the_run(rehearsal), the_run(rehearsal, "smollm2-refused"))
    check_refused(rehearsal.check, "a server that extracts nothing", wrong, "no hidden_states_path", **flags)
    other = copy_of(kimi.the_run(rehearsal), kimi.the_run(rehearsal, "kimi-refused"))
    check_refused(rehearsal.check, "a server of another model", other, "HTTP 400", **flags, aux_layers=kimi.AUX)


def copy_of(run: Run, copy: Run) -> Run:
    """A run folder with the same records and nothing else."""
    shutil.rmtree(copy.folder, ignore_errors=True)
    shutil.copytree(run.folder / "01_synthetic", copy.folder / "01_synthetic")
    return copy


def extract(rehearsal) -> None:
    run, check, spool = the_run(rehearsal), rehearsal.check, rehearsal.spool
    text = [id for record in run.records() for id in record["prompt_ids"] + record["output_ids"]]
    names = ("killed", "local", "refused")
    killed, local, refused = (copy_of(run, the_run(rehearsal, f"smollm2-{name}")) for name in names)

    log = rehearsal.work / "smollm2-extract.log"
    with extraction_server(run, spool, log, *CHUNKED, "--dtype", EXACT) as server:
        check_states(check, "SmolLM2", server, run, spool, text, AUX, reference_states)
        urls = {"spool": spool, "extract_urls": server.base_url + "/v1"}
        run("02", extractor="vllm", extract_concurrency=16, **urls)
        check("SmolLM2: the spool is empty after 02", left(spool) == [], left(spool))
        check_refused(check, "layer list shifted by one", refused, "extracts layers", **urls, aux_layers=[3, 16, 28])
        elsewhere = urls | {"spool": rehearsal.work / "elsewhere"}
        check_refused(check, "another spool", copy_of(run, refused), "set --spool", **elsewhere)
        check_killed_server(check, killed, run, server, spool, extract_concurrency=16)

    local("02", extractor="local")
    off, compared = run_distance(run, local)
    check("SmolLM2: 02's shards from vLLM are those of transformers", off < SAME, f"{compared}, off by {off:.4f}")
    counts = run.manifest("02_hidden").counts
    rehearsal.note("SmolLM2 states, vLLM to transformers", f"{compared} sequences, at most {off:.4f} apart")
    rehearsal.note("SmolLM2 on policy", f"{counts['nll']:.3f} nat/token, first choice {counts['top1']:.1%}")


def reference_states(prompts: list[list[int]]) -> list:
    """transformers' states at every layer's input and before the final norm, [31, T, H] a prompt, each prompt alone."""
    extractor = LocalExtractor(Target(model=MODEL), Extract(batch_tokens=1), tuple(range(DEPTH)), "cpu")
    streams = [Stream(str(i), array("i", ids), array("B", bytes(len(ids)))) for i, ids in enumerate(prompts)]
    by_id = {int(stream.id): states for stream, states in extractor.states(streams)}
    stacked = (torch.cat([by_id[i].aux, by_id[i].last], 1).unflatten(1, (DEPTH + 1, -1)) for i in range(len(prompts)))
    return [states.transpose(0, 1).float() for states in stacked]


def train(rehearsal) -> None:
    run = the_run(rehearsal)
    run("03", **DATASET)
    run("04", **TRAINING)
    counts = run.manifest("04_draft").counts
    lengths = {name: figures["walk"][str(K)]["length"] for name, figures in counts["baselines"].items()}
    length = counts["acceptance"]["walk"][str(K)]["length"]
    rehearsal.check(
        "SmolLM2: the draft beats the untrained one and the bigram floor", length > max(lengths.values()), lengths
    )
    rehearsal.note("SmolLM2 training", f"{counts['tokens']:,} tokens, {counts['seconds']:.0f} s")


def serve(rehearsal) -> None:
    run, check = the_run(rehearsal), rehearsal.check
    export = run.folder / "04_draft" / "export"
    records = held_out_records(run)
    prompts = [record["prompt_ids"] for record in records]
    with_draft = {"draft": str(export.resolve()), "k": K}
    target = ROOT / MODEL
    plain, drafted = decode(run, "serve", target, prompts, MAX_TOKENS, [None, with_draft], dtype=EXACT)
    check_lossless(check, "SmolLM2", records, plain["outputs"], drafted["outputs"])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    [rounded] = decode(run, "serve-bf16", target, prompts, MAX_TOKENS, [with_draft])
    ties = check_ties(check, "SmolLM2", model, prompts, plain["outputs"], rounded["outputs"])
    rehearsal.note("SmolLM2 with the draft in bf16, beside float32 without", ties)
    walk = run.manifest("04_draft").counts["acceptance"]["walk"][str(K)]
    row = check_acceptance(check, f"SmolLM2 k={K}", drafted, walk)
    rehearsal.note(f"SmolLM2 acceptance, {len(records)} held-out replies, k={K}", row)
    rehearsal.note("SmolLM2 seconds without and with the draft", f"{plain['seconds']:.0f}, {drafted['seconds']:.0f}")
    rehearsal.note(f"SmolLM2 acceptance in bf16, k={K}", row_of(rounded, walk))
    rehearsal.figures |= {"engine": engine_length(drafted), "offline": walk["length"]}
