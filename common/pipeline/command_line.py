"""The command line of every stage: flags over the TOML over the defaults, checked, and the fingerprint of the result.

Nothing here imports more than the standard library: `--help` answers at once.
"""

import argparse
import difflib
import tomllib
import typing
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path

from common.pipeline.errors import UserError
from common.pipeline.settings import SECTIONS

DEFAULT_CONFIG = "configs/kimi-k2.5.toml"


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
    file: dict[str, object]  # all sections, those that this stage does not read as the file has them: for dry runs

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

    `switches`: further flags that are no settings (`name: help`, or `name=METAVAR: help` for one with a value); they
    land in `flags`.
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
        _check_numbers(name, chosen[name])
    whole = {name: cls(**values[name]) for name, cls in SECTIONS.items()} | chosen
    if "target" in chosen and args.model not in (None, values["target"].get("model")):
        whole["sizes"] = SECTIONS["sizes"]()  # the file's are those of its own model
    run_dir = Path(args.run_dir) if args.run_dir else Path("runs") / config.stem
    return Settings(config, run_dir, args.n, args.dry_run, args.fresh, args, chosen, whole)


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
        name, _, metavar = name.partition("=")
        kind = {"metavar": metavar} if metavar else {"action": "store_true"}
        parser.add_argument(f"--{name}", help=text, **kind)
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


def _check_numbers(name: str, section) -> None:
    """Raise UserError for a number below the setting's least one, or NaN."""
    for f in fields(section):
        item, many = _item_type(f)
        values, least = getattr(section, f.name) if many else (getattr(section, f.name),), f.metadata["least"]
        if item in (int, float) and not all(value >= least for value in values):
            raise UserError(f"{name}.{f.name} must be at least {least}, not {' '.join(map(str, values))}")


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
