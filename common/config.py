"""Settings: dataclasses, TOML, flags, fingerprint.

One TOML per target holds a table per dataclass below. Flags beat the file, the file beats the defaults. A stage sees
only the sections that it reads, so that a flag `--batch-size` belongs to exactly one setting of that stage.
Nothing here imports more than the standard library: `--help` answers at once.
"""

import argparse
import difflib
import tomllib
import typing
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path

from common.errors import UserError

DEFAULT_CONFIG = "configs/kimi-k2.5.toml"


def setting(default, help: str, unit: str = "", content: bool = True, choices: tuple[str, ...] = ()):
    """A dataclass field with its help text. `content=False`: changes speed or place, never what is written."""
    return field(default=default, metadata={"help": help, "unit": unit, "content": content, "choices": choices})


@dataclass(frozen=True)
class Target:
    """The model that the draft is made for, and its token protocol (ids are asserted against the tokenizer)."""

    model: str = setting("", "hub name or local folder of the target")
    revision: str = setting("", "hub revision; empty: the newest")
    tokenizer: str = setting("", "hub name or folder of the tokenizer; empty: the same as model")
    trust_remote_code: bool = setting(False, "allow the checkpoint's own Python code to run")
    think_open: str = setting("<think>", "token that opens the reasoning; empty: the target does not think")
    think_open_id: int = setting(-1, "its id, asserted at start; -1: any single token")
    think_close: str = setting("</think>", "token that closes the reasoning")
    think_close_id: int = setting(-1, "its id, asserted at start; -1: any single token")
    end_token: str = setting("", "token that ends a reply; empty: the tokenizer's eos")
    end_token_id: int = setting(-1, "its id, asserted at start; -1: any single token")
    thinking_argument: str = setting("thinking", "chat template argument that turns reasoning on and off")


@dataclass(frozen=True)
class Questions:
    """Where questions come from (stage 01b)."""

    dataset: str = setting("mlabonne/open-perfectblend", "hub data set, or a local JSONL, JSON or Parquet file")
    split: str = setting("train", "split of a hub data set")
    shuffle_seed: int = setting(0, "seed of the order of questions; -1: the file's own order")
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
    concurrency: int = setting(128, "requests in flight", "requests", content=False)
    thinking: bool = setting(True, "let the target reason before it answers")
    thinking_budget: int = setting(0, "close the reasoning after so many tokens; 0: no limit", "tokens")
    temperature: float = setting(1.0, "sampling temperature; 0: greedy")
    top_p: float = setting(0.95, "nucleus sampling")
    max_tokens: int = setting(32768, "longest reply, reasoning included", "tokens")
    context_tokens: int = setting(262144, "the target's context: prompt and reply together", "tokens")
    seed: int = setting(0, "seed of the sampling")
    repeats: int = setting(1, "answers per question", "answers")
    request_timeout_s: float = setting(3600.0, "deadline of one request", "s", content=False)
    retries: int = setting(4, "tries after the first, with growing pauses", "tries", content=False)
    breaker: int = setting(64, "stop after so many failures in a row", "requests", content=False)
    silence_after: int = setting(16, "stop when so many first replies carry no reasoning", "replies", content=False)
    max_failed_share: float = setting(0.05, "exit 1 when more of the samples failed", content=False)
    batch_size: int = setting(32, "local engine: replies decoded side by side", "replies", content=False)
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
    shard_gib: float = setting(1.0, "size of a shard", "GiB", content=False)
    batch_tokens: int = setting(4096, "local extractor: tokens of a batch, padding included", "tokens", content=False)
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
    pack_tokens: int = setting(8192, "tokens of a packed batch; longer samples are cut", "tokens")


@dataclass(frozen=True)
class DraftModel:
    """The shape of the draft (stage 04); 0: as the target has it."""

    form: str = setting("llama", "attention: 'llama', or 'mla' as DeepSeek and Kimi have it", choices=("llama", "mla"))
    intermediate_size: int = setting(0, "width of the MLP")
    attention_heads: int = setting(0, "query heads")
    key_value_heads: int = setting(0, "key and value heads")
    head_dim: int = setting(0, "width of a head")
    norm_before_residual: bool = setting(False, "the residual is the normed state")
    norm_before_fc: bool = setting(False, "one RMSNorm over all aux states before fc")
    fc_norm: bool = setting(False, "one RMSNorm per aux state before fc (EAGLE-3.1)")
    norm_output: bool = setting(False, "feed back the state after the final norm (EAGLE-3.1)")


@dataclass(frozen=True)
class Train:
    """How the draft is trained (stage 04)."""

    epochs: float = setting(1.0, "passes over the training split", "epochs")
    learning_rate: float = setting(1e-4, "highest learning rate")
    warmup_share: float = setting(0.05, "share of the steps with rising learning rate")
    weight_decay: float = setting(0.0, "AdamW weight decay")
    grad_clip: float = setting(1.0, "highest gradient norm")
    packs_per_step: int = setting(1, "packed batches of an optimizer step, over all ranks", "packs")
    unrolled_steps: int = setting(7, "unrolled draft steps in training", "steps")
    step_weight: float = setting(0.8, "loss weight of step s is this to the power s")
    mask_outside_vocab: bool = setting(True, "no loss where the target's choice is outside the draft vocabulary")
    fc_init: str = setting("identity", "start of fc: the last aux state, or random", choices=("identity", "random"))
    seed: int = setting(0, "seed of initial weights and order")
    precision: str = setting("bf16", "compute dtype; master weights are float32", choices=("bf16", "fp32"))
    device: str = setting("auto", "'auto', 'cpu', 'cuda'", content=False)
    warm_start: str = setting("", "folder of a published EAGLE-3 draft to go on from")
    eval_every: int = setting(0, "evaluate each so many steps; 0: each epoch", "steps", content=False)
    checkpoint_every: int = setting(0, "checkpoint each so many steps; 0: each evaluation", "steps", content=False)
    keep_checkpoints: int = setting(2, "last checkpoints kept, beside the best", "checkpoints", content=False)


SECTIONS = {
    "target": Target,
    "questions": Questions,
    "generate": Generate,
    "extract": Extract,
    "dataset": Dataset,
    "draft": DraftModel,
    "train": Train,
}


@dataclass(frozen=True)
class Settings:
    """What one stage runs with: the common flags, and its sections by name (`settings.target.model`)."""

    config: Path
    run_dir: Path
    n: int | None
    dry_run: bool
    fresh: bool
    flags: argparse.Namespace
    sections: dict[str, object]

    def __getattr__(self, name: str):
        try:
            return self.sections[name]
        except KeyError:
            raise AttributeError(f"this stage does not read the section {name!r}") from None

    def as_dict(self) -> dict:
        """Every setting really used, for the manifest."""
        return {name: asdict(section) for name, section in self.sections.items()}

    def fingerprint(self) -> dict:
        """The settings that change content, as `section.key`: value (JSON types)."""
        return {
            f"{name}.{f.name}": _jsonable(getattr(section, f.name))
            for name, section in self.sections.items()
            for f in fields(section)
            if f.metadata["content"]
        }


def load_settings(
    argv: list[str] | None, description: str, sections: tuple[str, ...], switches: dict[str, str] | None = None
) -> Settings:
    """Settings of a stage from flags, file and defaults.

    `switches`: further command-line switches (`name: help`) that are no settings; they land in `flags`.
    Raises UserError with the nearest known name for an unknown key or flag.
    """
    parser = _parser(description, sections, switches or {})
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [s for action in parser._actions for s in action.option_strings]
        raise UserError(f"unknown flag {flag}{_nearest(flag, known)}; see --help")
    config = Path(args.config)
    table = _read_toml(config)
    for key in table:
        if key not in SECTIONS:
            raise UserError(f"{config}: unknown section [{key}]{_nearest(key, SECTIONS)}")
    values = {name: _section(config, name, table.get(name, {})) for name in SECTIONS}  # all, so that typos never hide
    chosen = {}
    for name in sections:
        cls = SECTIONS[name]
        flags = {f.name: getattr(args, f.name) for f in fields(cls) if getattr(args, f.name) is not None}
        flags = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}
        chosen[name] = cls(**{**values[name], **flags})
    run_dir = Path(args.run_dir) if args.run_dir else Path("runs") / config.stem
    return Settings(config, run_dir, args.n, args.dry_run, args.fresh, args, chosen)


def _item_type(f: Field) -> tuple[type, bool]:
    """The type of a setting's items, and whether it holds several."""
    if typing.get_origin(f.type) is tuple:
        return typing.get_args(f.type)[0], True
    return f.type, False


def _parser(description: str, sections: tuple[str, ...], switches: dict[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: (_ for _ in ()).throw(UserError(f"{message}; see --help"))
    parser.add_argument("--config", default=DEFAULT_CONFIG, help=f"TOML of the target (default {DEFAULT_CONFIG})")
    parser.add_argument("--run-dir", help="folder of the run (default runs/NAME-OF-CONFIG)")
    parser.add_argument("--n", type=_count, help="samples at most; raising it continues the run (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and touch nothing")
    parser.add_argument("--fresh", action="store_true", help="set the stage's old folder aside and start over")
    for name, text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    for name in sections:
        group = parser.add_argument_group(f"[{name}] {(SECTIONS[name].__doc__ or '').strip()}")
        for f in fields(SECTIONS[name]):
            item, many = _item_type(f)
            unit = f" [{f.metadata['unit']}]" if f.metadata["unit"] else ""
            default = " ".join(map(str, f.default)) if many else f.default
            text = f"{f.metadata['help']}{unit} (default {default!r})".replace("%", "%%")
            flag = "--" + f.name.replace("_", "-")
            if item is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            else:
                choices = f.metadata["choices"] or None
                metavar = None if choices else item.__name__.upper()
                group.add_argument(
                    flag, nargs="+" if many else None, type=item, metavar=metavar, choices=choices, help=text
                )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _read_toml(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such config: {path}; the ready ones are in configs/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(f"{path}: not a TOML file: {error}") from None


def _section(path: Path, name: str, table: dict) -> dict:
    """The checked values of one TOML table; raises UserError for unknown keys and wrong types."""
    if not isinstance(table, dict):
        raise UserError(f"{path}: [{name}] must be a table")
    known = {f.name: f for f in fields(SECTIONS[name])}
    checked = {}
    for key, value in table.items():
        if key not in known:
            raise UserError(f"{path}: unknown key {key!r} in [{name}]{_nearest(key, known)}")
        item, many = _item_type(known[key])
        items = value if many and isinstance(value, list) else [value]
        if item is float:
            items = [float(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in items]
        if not all(type(v) is item for v in items) or (many and not isinstance(value, list)):
            raise UserError(f"{path}: {name}.{key} must be {'a list of ' * many}{item.__name__}, not {value!r}")
        choices = known[key].metadata["choices"]
        if choices and value not in choices:
            raise UserError(f"{path}: {name}.{key} must be one of {', '.join(choices)}, not {value!r}")
        checked[key] = tuple(items) if many else items[0]
    return checked


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _jsonable(value):
    return list(value) if isinstance(value, tuple) else value
