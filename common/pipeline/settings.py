"""Settings: one dataclass a section, each field with its default, help text and unit.

One TOML per target holds a table per dataclass below; common/pipeline/command_line.py reads it, and the flags. A stage
sees only the sections that it reads, so that a flag `--batch-size` belongs to exactly one setting of that stage.
"""

from dataclasses import dataclass, field


def setting(default, help: str, unit: str = "", content: bool = True, choices: tuple[str, ...] = (), least: int = 0):
    """A dataclass field with its help text. `content=False`: changes speed or place, never what is written."""
    facts = {"help": help, "unit": unit, "content": content, "choices": choices, "least": least}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Target:
    """The model that the draft is made for, and its token protocol (ids are asserted against the tokenizer)."""

    model: str = setting("", "hub name or local folder of the target")
    revision: str = setting("", "hub revision; empty: the newest")
    tokenizer: str = setting("", "hub name or folder of the tokenizer; empty: the same as model")
    trust_remote_code: bool = setting(False, "allow the checkpoint's own Python code to run")
    think_open: str = setting("<think>", "token that opens the reasoning; empty: the target does not think")
    think_open_id: int = setting(-1, "its id, asserted at start; -1: any single token", least=-1)
    think_close: str = setting("</think>", "token that closes the reasoning")
    think_close_id: int = setting(-1, "its id, asserted at start; -1: any single token", least=-1)
    end_token: str = setting("", "token that ends a reply; empty: the tokenizer's eos")
    end_token_id: int = setting(-1, "its id, asserted at start; -1: any single token", least=-1)
    thinking_argument: str = setting("thinking", "chat template argument that turns reasoning on and off")
    reasoning_parser: str = setting("", "vLLM's parser of the reasoning, for --print-server-command", content=False)
    tensor_parallel: int = setting(1, "GPUs of one server, for --print-server-command", "GPUs", content=False)
    server_flags: tuple[str, ...] = setting((), "further flags of the target's servers", content=False)


@dataclass(frozen=True)
class Questions:
    """Where questions come from (stage 01b)."""

    dataset: str = setting(
        "mlabonne/open-perfectblend",
        "hub data set, NAME or NAME:CONFIGURATION; or a folder; or a file: JSONL, JSON, Parquet, CSV, text",
    )
    split: str = setting("train", "split of a hub data set")
    shuffle_seed: int = setting(0, "seed of the order of questions; -1: the file's own order", least=-1)
    streaming: bool = setting(False, "read a hub data set as it arrives, shuffled within 10,000 rows at a time")
    turns: str = setting("first", "'first': the first turn only; 'all': every turn in order", choices=("first", "all"))
    system_prompt: str = setting("", "system message put before every question that has none")


@dataclass(frozen=True)
class Generate:
    """How the target answers (stage 01b)."""

    engine: str = setting(
        "openai", "'openai': a vLLM or SGLang server; 'local': transformers in process", choices=("openai", "local")
    )
    base_urls: tuple[str, ...] = setting(("http://localhost:8000/v1",), "servers, used side by side", content=False)
    api_key: str = setting("EMPTY", "key sent to the server", content=False)
    served_model: str = setting("", "model name on the server; empty: the first it lists", content=False)
    concurrency: int = setting(128, "requests in flight", "requests", content=False, least=1)
    thinking: bool = setting(True, "let the target reason before it answers")
    thinking_budget: int = setting(0, "close the reasoning after so many tokens; 0: no limit", "tokens")
    temperature: float = setting(1.0, "sampling temperature; 0: greedy")
    top_p: float = setting(0.95, "nucleus sampling")
    max_tokens: int = setting(32768, "longest reply, reasoning included", "tokens")
    context_tokens: int = setting(262144, "the target's context: prompt and reply together", "tokens")
    seed: int = setting(0, "seed of the sampling")
    repeats: int = setting(1, "answers per question", "answers", least=1)
    request_timeout_s: float = setting(3600.0, "deadline of one request", "s", content=False)
    retries: int = setting(4, "tries after the first, with growing pauses", "tries", content=False)
    outage_s: float = setting(60.0, "wait so long for servers that refuse connections", "s", content=False)
    breaker: int = setting(64, "stop after so many failures in a row", "requests", content=False)
    silence_after: int = setting(16, "stop when so many first replies carry no reasoning", "replies", content=False)
    max_silent_share: float = setting(0.1, "warn when more of the samples carry no reasoning", content=False)
    max_failed_share: float = setting(0.05, "exit 1 when more of the samples failed", content=False)
    batch_size: int = setting(32, "local engine: replies decoded side by side", "replies", content=False, least=1)
    device: str = setting("auto", "local engine: 'auto', 'cpu', 'cuda', ...", content=False)


@dataclass(frozen=True)
class Extract:
    """How the target's hidden states are taken (stage 02)."""

    extractor: str = setting(
        "vllm", "'vllm': extraction servers; 'local': transformers in process", "", False, ("vllm", "local")
    )
    extract_urls: tuple[str, ...] = setting(("http://localhost:8001/v1",), "extraction servers", content=False)
    aux_layers: tuple[int, ...] = setting((), "layers whose input is kept, as vLLM counts; empty: 2, N//2, N-3")
    max_tokens_per_sample: int = setting(32768, "longer streams are cut here", "tokens")
    store_dtype: str = setting(
        "bf16", "how aux states are stored; the last state stays bf16", "", True, ("bf16", "fp8")
    )
    spool: str = setting("/dev/shm/kimi-eagle3", "folder in which the servers leave states", content=False)
    extract_concurrency: int = setting(32, "requests in flight over all servers", "requests", content=False)
    extract_timeout_s: float = setting(600.0, "deadline of one sample, its file included", "s", content=False)
    extract_retries: int = setting(3, "tries after the first, with growing pauses", "tries", content=False)
    extract_breaker: int = setting(32, "stop after so many failures in a row", "samples", content=False)
    shard_gib: float = setting(1.0, "size of a shard", "GiB", content=False)
    window: str = setting("", "keep no more training shards than this, as 500GB; 04 --follow deletes; empty: keep all")
    batch_tokens: int = setting(
        4096, "local extractor: tokens of a batch, padding included", "tokens", content=False, least=1
    )
    device: str = setting("auto", "local extractor: 'auto', 'cpu', 'cuda', ...", content=False)
    check_first: int = setting(8, "sequences of a shard that the on-policy check reads", "sequences", content=False)
    max_nll: float = setting(2.0, "stop when the target's own tokens cost more on average", "nat/token", content=False)
    min_top1: float = setting(0.5, "stop when fewer of them are the target's own first choice", content=False)
    max_failed_share: float = setting(0.05, "exit 1 when more of the samples failed", content=False)


@dataclass(frozen=True)
class Dataset:
    """How shards become a training set (stage 03)."""

    draft_vocab_size: int = setting(32000, "tokens that the draft can propose; 0: the target's whole vocabulary")
    holdout_share: float = setting(0.02, "share of the questions kept for evaluation")
    split_seed: int = setting(0, "seed of the split")
    min_supervised: int = setting(2, "drop samples with fewer tokens written by the target", "tokens")
    max_tokens: int = setting(0, "drop longer samples; 0: none", "tokens")
    drop_cut: bool = setting(False, "drop replies that were cut at the token limit")
    min_reasoning_share: float = setting(0.0, "drop samples with a smaller share of reasoning in the reply")
    source_pattern: str = setting("", "keep only samples whose source matches this regex")
    pack_tokens: int = setting(8192, "tokens of a packed batch; longer samples are cut", "tokens", least=1)


@dataclass(frozen=True)
class DraftModel:
    """The shape of the draft (stage 04); 0: as the target has it."""

    form: str = setting("llama", "attention: 'llama', or 'mla' as DeepSeek and Kimi have it", choices=("llama", "mla"))
    intermediate_size: int = setting(0, "width of the MLP")
    attention_heads: int = setting(0, "query heads")
    key_value_heads: int = setting(0, "key and value heads")
    head_dim: int = setting(0, "width of a head")
    norm_before_residual: bool = setting(False, "the residual is the normed state (vLLM only)")
    norm_before_fc: bool = setting(False, "one RMSNorm over all aux states before fc (vLLM only)")
    fc_norm: bool = setting(True, "one RMSNorm per aux state before fc (EAGLE-3.1)")
    norm_output: bool = setting(True, "feed back the state after the final norm (EAGLE-3.1)")


@dataclass(frozen=True)
class Train:
    """How the draft is trained (stage 04)."""

    epochs: float = setting(1.0, "passes over the training split", "epochs")
    learning_rate: float = setting(1e-4, "highest learning rate")
    warmup_share: float = setting(0.05, "share of the steps with rising learning rate")
    optimizer: str = setting(
        "muon", "'muon': Muon for the layer and fc, AdamW for the rest", "", True, ("adamw", "muon")
    )
    weight_decay: float = setting(0.0, "weight decay of the matrices")
    grad_clip: float = setting(1.0, "highest gradient norm")
    packs_per_step: int = setting(1, "packed batches of an optimizer step, over all ranks", "packs", least=1)
    unrolled_steps: int = setting(7, "unrolled draft steps in training", "steps", least=1)
    eval_steps: int = setting(7, "unrolled draft steps in evaluation: acceptance for k = 1 to this", "steps", least=1)
    step_weight: float = setting(0.8, "loss weight of step s is this to the power s")
    step_weights: tuple[float, ...] = setting((), "loss weight of each step, in place of step_weight's powers")
    hard_label_share: float = setting(0.0, "share of the loss against the target's first choice alone, 0 to 1")
    train_embedding: bool = setting(False, "train the copy of the target's embedding too, in float32")
    train_head: bool = setting(True, "train the head, whose rows start as the target's")
    mask_outside_vocab: bool = setting(True, "no loss where the target's choice is outside the draft vocabulary")
    fc_init: str = setting("identity", "start of fc: the last aux state, or random", choices=("identity", "random"))
    seed: int = setting(0, "seed of initial weights and order")
    precision: str = setting("bf16", "compute dtype; master weights are float32", choices=("bf16", "fp32"))
    device: str = setting("auto", "'auto', 'cpu', 'cuda'", content=False)
    parallel: str = setting(
        "ddp", "ranks: 'ddp' keeps weights on each, 'fsdp' shares them out", "", False, ("ddp", "fsdp")
    )
    compile: bool = setting(True, "compile the element-wise loops (eager where no compiler is found)", content=False)
    warm_start: str = setting("", "folder of a published EAGLE-3 draft to go on from")
    draft_cost: float = setting(0.05, "time of a draft step over one of the target's forwards", content=False)
    compare: tuple[str, ...] = setting((), "other run folders whose curves report.html shows too", content=False)
    tensorboard: bool = setting(
        False, "write metrics for TensorBoard too, into RUN/04_draft/tensorboard", content=False
    )
    wandb: bool = setting(False, "send metrics to Weights & Biases too", content=False)
    eval_every: int = setting(0, "evaluate each so many steps; 0: each epoch", "steps", content=False)
    checkpoint_every: int = setting(0, "checkpoint each so many steps; 0: each evaluation", "steps", content=False)
    keep_checkpoints: int = setting(2, "last checkpoints kept, beside the best", "checkpoints", content=False)


@dataclass(frozen=True)
class Sizes:
    """The target's sizes, named as in its config.json: what a dry run reads where the checkpoint is not there.

    No flags: they belong to the file's model. Where the checkpoint is there they are asserted; 0: not said.
    """

    hidden_size: int = setting(0, "width of the residual stream")
    num_hidden_layers: int = setting(0, "layers")
    vocab_size: int = setting(0, "rows of the head")
    rms_norm_eps: float = setting(0.0, "epsilon of the norms")
    intermediate_size: int = setting(0, "width of the dense MLP")
    num_attention_heads: int = setting(0, "query heads")
    num_key_value_heads: int = setting(0, "key and value heads")
    head_dim: int = setting(0, "width of a head")
    q_lora_rank: int = setting(0, "MLA: rank of the queries")
    kv_lora_rank: int = setting(0, "MLA: rank of keys and values, the cached part")
    qk_nope_head_dim: int = setting(0, "MLA: width of a head without rotary")
    qk_rope_head_dim: int = setting(0, "MLA: rotary width")
    v_head_dim: int = setting(0, "MLA: width of a value")
    active_b: float = setting(0.0, "weights that one token passes through", "10^9")
    weights_gb: float = setting(0.0, "the checkpoint on disk and in memory", "GB")


@dataclass(frozen=True)
class Plan:
    """What a dry run assumes where nothing is measured yet; no result depends on it."""

    assume_samples: int = setting(10_000, "samples, where neither --n nor a file says", "samples", False, least=1)
    assume_prompt_tokens: int = setting(200, "mean prompt", "tokens", False, least=1)
    assume_output_tokens: int = setting(3896, "mean reply, reasoning included", "tokens", False, least=1)
    assume_gpus: int = setting(8, "GPUs of the node", "GPUs", False, least=1)
    assume_utilisation: float = setting(
        0.35, "share of the GPUs' published bf16 rate that is reached in training and extraction", content=False
    )
    assume_bandwidth: float = setting(
        0.5, "share of the GPUs' published memory bandwidth that is reached in generation", content=False
    )
    assume_disk_gb_s: float = setting(2.0, "what the disk writes", "GB/s", False)


@dataclass(frozen=True)
class Serving:
    """What 04 exports, and how it measures a draft on running vLLM servers (04 --serve-eval)."""

    export_format: str = setting(
        "eagle3",
        "'eagle3': what vLLM and SGLang load; 'speculators': that layout too, in export-speculators/",
        "",
        False,
        ("eagle3", "speculators"),
    )
    serve_eval: str = setting("", "server that drafts, as http://localhost:8000: measure it", content=False)
    without_draft: str = setting("", "the same target without a draft, to compare with", content=False)
    questions: str = setting("", "question file; empty: the config's data set in another order", content=False)
    eval_concurrency: int = setting(8, "requests in flight", "requests", content=False, least=1)
    eval_temperature: float = setting(0.0, "sampling temperature; 0: greedy", content=False)
    eval_max_tokens: int = setting(1024, "longest reply, reasoning included", "tokens", content=False, least=1)
    eval_timeout_s: float = setting(3600.0, "deadline of one request", "s", content=False)


SECTIONS = {
    "target": Target,
    "questions": Questions,
    "generate": Generate,
    "extract": Extract,
    "dataset": Dataset,
    "draft": DraftModel,
    "train": Train,
    "serving": Serving,
    "sizes": Sizes,
    "plan": Plan,
}
