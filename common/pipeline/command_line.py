"""The command line of every stage: flags over the TOML over the defaults, checked, and the fingerprint of the result.

Only the standard library is imported here, so that `--help` answers at once.
"""

import argparse
import difflib
import os
import tomllib
import typing
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.settings import SECTIONS

DEFAULT_CONFIG = Path("configs/kimi-k2.5.toml")


@dataclass(frozen=True)
class Settings:
    """What one stage runs with: the flags of every stage, all sections as attributes (`settings.target.model`), and
    the stage's own switches (`settings.switches.probe`).

    `stage_sections`: the sections that the stage uses. The others hold what the TOML says, for dry runs.
    `shipped_config`: configs/NAME.config.json, a copy of the target's config.json; None without one or for another
    --model than the TOML's.
    """

    config: Path
    run_dir: Path
    n: int | None
    dry_run: bool
    fresh: bool
    device: str
    switches: argparse.Namespace
    shipped_config: Path | None
    stage_sections: tuple[str, ...]
    sections: dict[str, typing.Any]

    def __getattr__(self, name: str):
        if name in SECTIONS:
            return self.sections[name]
        raise AttributeError(f"no section {name!r}")

    def as_dict(self) -> dict:
        """Every setting that the stage uses, for its manifest."""
        return {name: asdict(self.sections[name]) for name in self.stage_sections}

    def fingerprint(self) -> dict:
        """The settings that change what the stage writes, as `section.key`: value (JSON types)."""
        return {
            f"{name}.{f.name}": list(value) if isinstance(value, tuple) else value
            for name in self.stage_sections
            for f in fields(SECTIONS[name])
            if f.metadata["in_fingerprint"]
            for value in [getattr(self.sections[name], f.name)]
        }


def load_settings(
    argv: list[str] | None, description: str, sections: tuple[str, ...], switches: dict[str, str] | None = None
) -> Settings:
    """Settings of a stage from flags, TOML and defaults.

    `switches`: further flags that are no settings (`name: help`, or `name=METAVAR: help` for one with a value).
    Raises UserError, with the nearest known name for an unknown key or flag.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the stages show their own progress
    parser = _parser(description, sections, switches or {})
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        raise UserError(f"unknown flag {flag}{_nearest(flag, parser._option_string_actions)}; see --help")
    if args.n is not None and args.n < 1:
        raise UserError(f"--n must be at least 1, not {args.n}")
    tables = _read_toml(args.config)
    for name, table in tables.items():
        if name not in SECTIONS:
            raise UserError(f"{args.config}: unknown section [{name}]{_nearest(name, SECTIONS)}")
        if not isinstance(table, dict):
            raise UserError(f"{args.config}: [{name}] must be a table")
    other_model = getattr(args, "model", None) not in (None, tables.get("target", {}).get("model"))
    for key in ("active_b", "weights_gb") if other_model else ():  # the TOML's are those of its own model
        tables.get("forecast", {}).pop(key, None)
    chosen = {}
    for name, cls in SECTIONS.items():  # all of them, so that a typo in any section is reported by every stage
        table, known = tables.get(name, {}), {f.name: f for f in fields(cls)}
        for key in table:
            if key not in known:
                raise UserError(f"{args.config}: unknown key {key!r} in [{name}]{_nearest(key, known)}")
        values = {key: _checked(f"{args.config}: {name}.{key}", known[key], value) for key, value in table.items()}
        given = {key: getattr(args, key) for key in known if name in sections and getattr(args, key) is not None}
        values |= {key: _checked("--" + key.replace("_", "-"), known[key], value) for key, value in given.items()}
        chosen[name] = cls(**values)
    run_dir, shipped = args.run_dir or Path("runs") / args.config.stem, args.config.with_suffix(".config.json")
    shipped = shipped if shipped.exists() and not other_model else None
    common = (args.config, run_dir, args.n, args.dry_run, args.fresh, args.device)
    return Settings(*common, args, shipped, sections, chosen)


def _type(f: Field) -> tuple[type, bool, tuple[str, ...]]:
    """The type of a setting's items, whether it holds several, and its choices, if any."""
    many = typing.get_origin(f.type) is tuple
    item = typing.get_args(f.type)[0] if many else f.type
    choices = typing.get_args(item)
    return (str if choices else item), many, choices


def _checked(name: str, f: Field, value):
    """A value out of the TOML or of a flag; raises UserError for a wrong type or choice, and for too small a number."""
    item, many, choices = _type(f)
    items = value if many and isinstance(value, list) else [value]
    if item is float:
        items = [float(v) if type(v) is int else v for v in items]
    if many != isinstance(value, list) or not all(type(v) is item for v in items):
        raise UserError(f"{name} must be {'a list of ' * many}{item.__name__}, not {value!r}")
    if choices and not set(items) <= set(choices):
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    if item in (int, float) and not all(v >= f.metadata["minimum"] for v in items):  # NaN fails too
        raise UserError(f"{name} must be at least {f.metadata['minimum']}, not {' '.join(map(str, items))}")
    return tuple(items) if many else items[0]


def _parser(description: str, sections: tuple[str, ...], switches: dict[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: (_ for _ in ()).throw(UserError(f"{message}; see --help"))
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="TOML of the target (default %(default)s)")
    parser.add_argument("--run-dir", type=Path, help="folder of the run (default runs/NAME-OF-CONFIG)")
    parser.add_argument(
        "--n", type=int, metavar="N", help="samples at most; raising it continues the run (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the forecast and touch nothing")
    parser.add_argument("--fresh", action="store_true", help="set the stage's old folder aside and start over")
    parser.add_argument("--device", default="auto", help="of torch in this process: auto, cpu, cuda (default auto)")
    for name, text in switches.items():
        name, _, metavar = name.partition("=")
        parser.add_argument(f"--{name}", help=text, **({"metavar": metavar} if metavar else {"action": "store_true"}))
    for name in sections:
        group = parser.add_argument_group(f"[{name}] {SECTIONS[name].__doc__}")
        for f in fields(SECTIONS[name]):
            item, many, choices = _type(f)
            unit = f" [{f.metadata['unit']}]" if f.metadata["unit"] else ""
            default = " ".join(map(str, f.default)) if many else f.default
            metavar = f"{{{','.join(choices)}}}" if choices else item.__name__.upper()
            kind = {"type": item, "nargs": "+" if many else None, "metavar": metavar}
            if item is bool:
                kind = {"action": argparse.BooleanOptionalAction, "default": None}
            text = f"{f.metadata['help']}{unit} (default {default!r})".replace("%", "%%")
            group.add_argument("--" + f.name.replace("_", "-"), help=text, **kind)
    return parser


def _read_toml(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such config: {path}; the ready ones are in configs/") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(f"{path}: not a TOML file: {error}") from None


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
