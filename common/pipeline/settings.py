"""Settings: one dataclass a section, each field with its default, help text and unit.

The TOML of a target holds a table for each dataclass below; common/pipeline/command_line.py reads it and the flags.
A stage has flags for the sections that it uses, so that `--batch-size` belongs to exactly one setting of that stage.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal


def setting(default, help: str, unit: str = "", minimum: int = 0, in_fingerprint: bool = True):
    """A dataclass field with its help text. `minimum`: of a number, or of each number in a tuple."""
    facts = {"help": help, "unit": unit, "minimum": minimum, "in_fingerprint": in_fingerprint}
    return field(default=default, metadata=facts)


runtime = partial(setting, in_fingerprint=False)  # decides speed, addresses or folders, never what is written


@dataclass(frozen=True)
class Target:
    """The model that the draft is made for, and its control tokens (ids are asserted against the tokenizer)."""

    model: str = setting("", "hub name or local folder of the target")
    revision: str = setting("", "hub revision; empty: the newest")
    tokenizer: str = setting("", "hub name or folder of the tokenizer; empty: the same as model")
    trust_remote_code: bool = setting(False, "allow the checkpoint's own Python code to run")
    think_open: str = setting("<think>", "token that opens the reasoning; empty: the target does not reason")
    think_open_id: int = setting(-1, "id of think_open, asserted at start; -1: any single token", minimum=-1)
    think_close: str = setting("</think>", "token that closes the reasoning")
    think_close_id: int = setting(-1, "id of think_close, asserted at start; -1: any single token", minimum=-1)
    end_token: str = setting("", "token that ends a reply; empty: the tokenizer's eos")
    end_token_id: int = setting(-1, "id of end_token, asserted at start; -1: any single token", minimum=-1)
    thinking_argument: str = setting("thinking", "chat template argument that turns reasoning on and off")
    reasoning_parser: str = runtime("", "vLLM's reasoning parser, for --print-server-command")
    tensor_parallel: int = runtime(1, "GPUs of one server, for --print-server-command", "GPUs")
    server_flags: tuple[str, ...] = runtime((), "further flags of the target's servers, for --print-server-command")


@dataclass(frozen=True)
class Questions:
    """Where questions come from (stage 01b)."""

    dataset: str = setting(
        "mlabonne/open-perfectblend",
        "hub data set, NAME or NAME:CONFIGURATION; folder; JSON(L), Parquet, CSV or text file",
    )
    split: str = setting("train", "split of a hub data set")
    shuffle_seed: int = setting(0, "seed of the order of questions; -1: the order of the file", minimum=-1)
    streaming: bool = setting(False, "read a hub data set while it downloads, shuffled within 10,000 rows at a time")
    turns: Literal["first", "all"] = setting("first", "ask the first turn of a conversation only, or all in order")
    system_prompt: str = setting("", "system message put before every question that has none")


@dataclass(frozen=True)
class Generate:
    """How the target answers (stage 01b). The servers' API key is read from OPENAI_API_KEY."""

    engine: Literal["openai", "local"] = setting("openai", "a vLLM or SGLang server, or transformers in process")
    base_urls: tuple[str, ...] = runtime(("http://localhost:8000/v1",), "servers that share the requests")
    served_model: str = runtime("", "model name on the server; empty: the first that it lists")
    concurrency: int = runtime(128, "requests in flight over all servers", "requests", 1)
    thinking: bool = setting(True, "let the target reason before it answers")
    thinking_budget: int = setting(0, "close the reasoning after this many tokens; 0: no limit", "tokens")
    temperature: float = setting(1.0, "sampling temperature; 0: greedy")
    top_p: float = setting(0.95, "nucleus sampling: share of the probability that is sampled from")
    max_tokens: int = setting(32768, "longest reply, reasoning included", "tokens")
    context_tokens: int = setting(262144, "the target's context: prompt and reply together", "tokens")
    seed: int = setting(0, "seed of the sampling")
    repeats: int = setting(1, "replies to each question", "replies", 1)
    request_timeout_s: float = runtime(3600.0, "deadline of one request", "s")
    outage_s: float = runtime(60.0, "how long to wait for unreachable servers", "s")
    batch_size: int = runtime(32, "local engine: replies decoded in one batch", "replies", 1)


@dataclass(frozen=True)
class Extract:
    """How the target's hidden states are computed (stage 02)."""

    extractor: Literal["vllm", "local"] = runtime("vllm", "extraction servers, or transformers in process")
    extract_urls: tuple[str, ...] = runtime(("http://localhost:8001/v1",), "extraction servers that share the requests")
    aux_layers: tuple[int, ...] = setting((), "layers whose input is stored, as vLLM counts; empty: 2, N//2, N-3")
    max_tokens_per_sample: int = setting(32768, "longer streams are cut to this", "tokens")
    store_dtype: Literal["bf16", "fp8"] = setting("bf16", "dtype of the stored aux states; the last state is bf16")
    spool: str = runtime("/dev/shm/kimi-eagle3", "folder where the servers write states")
    extract_concurrency: int = runtime(32, "requests in flight over all servers", "requests")
    shard_gib: float = runtime(1.0, "size of a shard", "GiB")
    window: str = setting("", "disk budget of the training shards, as 500GB; 04 --follow deletes; empty: keep all")
    batch_tokens: int = runtime(4096, "local extractor: tokens of a batch, padding included", "tokens", 1)


@dataclass(frozen=True)
class Dataset:
    """How shards become a training set (stage 03)."""

    draft_vocab_size: int = setting(32000, "tokens that the draft can propose; 0: the target's whole vocabulary")
    holdout_share: float = setting(0.02, "share of the questions held out for evaluation, 0 to 1")
    sample_tokens: int = setting(8192, "longer samples are cut to this", "tokens", 1)


@dataclass(frozen=True)
class DraftModel:
    """The shape of the draft (stage 04); 0: as the target has it."""

    form: Literal["llama", "mla"] = setting("llama", "attention of Llama, or that of DeepSeek and Kimi")
    eagle: Literal["3.1", "3"] = setting("3.1", "EAGLE-3.1 norms each aux state and the state fed back; 3 does not")
    intermediate_size: int = setting(0, "width of the MLP")
    attention_heads: int = setting(0, "query heads")
    key_value_heads: int = setting(0, "key and value heads")
    head_dim: int = setting(0, "width of a head")


@dataclass(frozen=True)
class Train:
    """How the draft is trained (stage 04)."""

    epochs: float = setting(1.0, "passes over the training split", "epochs")
    learning_rate: float = setting(1e-4, "learning rate after the warm-up")
    optimizer: Literal["adamw", "muon"] = setting("muon", "Muon trains the layer and fc, AdamW the rest; or AdamW all")
    packs_per_step: int = setting(1, "packs of an optimizer step, over all ranks", "packs", 1)
    pack_tokens: int = setting(8192, "tokens of a pack on one GPU; decides memory and speed", "tokens", 1)
    unrolled_steps: int = setting(7, "unrolled draft steps in training", "steps", 1)
    eval_steps: int = setting(7, "unrolled draft steps in evaluation: acceptance for k = 1 to this", "steps", 1)
    step_weight: float = setting(0.8, "loss weight of unrolled step s: this number to the power s")
    seed: int = setting(0, "seed of initial weights and order")
    precision: Literal["bf16", "fp32"] = setting("bf16", "dtype of the computation; master weights are float32")
    parallel: Literal["ddp", "fsdp"] = runtime("ddp", "ranks each hold all weights (ddp) or shard them (fsdp)")
    compile: bool = runtime(True, "compile the element-wise loops (eager without a compiler)")
    warm_start: str = setting("", "folder of a published EAGLE-3 draft to initialise from")
    compare: tuple[str, ...] = runtime((), "other run folders whose curves report.html shows too")
    track: tuple[Literal["tensorboard", "wandb"], ...] = runtime((), "trackers that receive the metrics too")
    eval_every: int = runtime(0, "steps between evaluations, each with a checkpoint; 0: one an epoch", "steps")


@dataclass(frozen=True)
class Serving:
    """What 04 exports, and how it measures a draft on running vLLM servers (04 --serve-eval)."""

    export_format: Literal["eagle3", "speculators"] = runtime("eagle3", "speculators adds export-speculators/")
    serve_eval: str = runtime("", "measure the draft on this server, as http://localhost:8000")
    without_draft: str = runtime("", "server of the same target without a draft, to compare with")
    questions: str = runtime("", "question file; empty: the config's data set in another order")
    eval_concurrency: int = runtime(8, "requests in flight", "requests", 1)
    eval_temperature: float = runtime(0.0, "sampling temperature; 0: greedy")
    eval_max_tokens: int = runtime(1024, "longest reply, reasoning included", "tokens", 1)


@dataclass(frozen=True)
class Forecast:
    """What a dry run assumes where nothing is measured yet; no result depends on it."""

    active_b: float = runtime(0.0, "weights of the target that one token passes through", "10^9")
    weights_gb: float = runtime(0.0, "size of the target's weights on disk and in memory", "GB")
    assume_output_tokens: int = runtime(3896, "mean reply, reasoning included", "tokens", 1)
    assume_gpus: int = runtime(8, "GPUs of the node", "GPUs", 1)
    assume_utilisation: float = runtime(0.35, "share of the published bf16 rate in training and extraction, 0 to 1")
    assume_bandwidth: float = runtime(0.5, "share of the published memory bandwidth in generation, 0 to 1")
    assume_disk_gb_s: float = runtime(2.0, "rate at which the disk writes", "GB/s")


SECTIONS = dict(target=Target, questions=Questions, generate=Generate, extract=Extract, dataset=Dataset)
SECTIONS |= dict(draft=DraftModel, train=Train, serving=Serving, forecast=Forecast)
