"""
Loads the settings of a server: flag > environment > virta.toml > default.

`load` reads every setting from the first of these that has it, checks it against its range and records
the origin. All invalid values are reported in one error, each with the setting, the value, its origin and
what is allowed.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta.errors import ConfigError
from virta.quantities import parse_duration, parse_size
from virta.server.access.hosts import HOSTS_MAX, read_host
from virta.server.access.origins import ORIGINS_MAX, read_origin
from virta.server.operating.rules import RETENTION_RULES_MAX, read_retention_rule
from virta.server.settings import SETTINGS, Setting
from virta.server.webhooks.addresses import RULES_MAX, read_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE_NAME = "virta.toml"
SOURCE, THORIUM_SOURCE = "//virta", "//name.djsweet.thorium"
LOG_NAME = "log"
FILE_TABLE = "server"
OFF = "none"
# Python also reads `8_0` and digits of other scripts.
INTEGER = re.compile(r"\s*[+-]?[0-9]{1,100}\s*")
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
# How one entry of each list is parsed, and how many entries are allowed.
READERS: dict[str, tuple[Callable[[str], str | None], int]] = {
    "allow_origin": (read_origin, ORIGINS_MAX),
    "allow_host": (read_host, HOSTS_MAX),
    "webhook_allow": (read_rule, RULES_MAX),
    "retention_channel": (read_retention_rule, RETENTION_RULES_MAX),
}
# Texts that have to be a quantity: what parses them, and raises ValueError.
QUANTITIES: dict[str, Callable[[str], object]] = {
    "retention_age": parse_duration,
    "retention_bytes": parse_size,
}
FALSE_WORDS = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class SettingValue:
    """A setting's value and where it came from."""

    value: Any
    origin: str


class Config:
    """The values of all settings, as attributes."""

    def __init__(self, values: Mapping[str, SettingValue]) -> None:
        self.values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name].value
        except KeyError:
            raise AttributeError(f"no setting {name!r}") from None

    @property
    def source(self) -> str:
        """The `source` of events that the server itself makes."""
        return str(self.source_name or (THORIUM_SOURCE if self.thorium_compatible else SOURCE))

    @property
    def log_path(self) -> Path:
        return Path(self.data_dir) / LOG_NAME


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> Config:
    """
    Load every setting.

    Args:
        flags: values given on the command line, by setting name; None means not given.
        environ: the environment to read.
        file: a TOML file that must exist; without it `virta.toml` here is read when present.

    Raises:
        ConfigError: a value out of range, an unknown key, a file that cannot be read.
    """
    flags = flags or {}
    environ = environ or {}
    table, path = _read_file(file)
    problems: list[ConfigError] = []
    values: dict[str, SettingValue] = {}
    for setting in SETTINGS:
        raw, origin = _raw_value(setting, flags, environ, table, path)
        try:
            values[setting.name] = SettingValue(_checked_value(setting, raw, origin), origin)
        except ConfigError as error:
            problems.append(error)
    known = {name for setting in SETTINGS for name in (setting.name, *setting.aliases)}
    problems.extend(
        ConfigError(
            f"{path}: unknown key {key!r}: the settings are those of `virta config`",
            setting=key,
            origin=str(path),
        )
        for key in table
        if key not in known
    )
    if problems:
        text = "\n".join(problem.message for problem in problems)
        raise ConfigError(text, setting=problems[0].setting, origin=problems[0].origin)
    return Config(values)


def _read_file(file: str | Path | None) -> tuple[dict[str, Any], Path]:
    path = Path(file) if file is not None else Path(FILE_NAME)
    if file is None and not path.exists():
        return {}, path
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", origin=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", origin=str(path)) from error
    table = document.get(FILE_TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path}: `{FILE_TABLE}` must be a table, got {table!r}", origin=str(path)
        )
    log = document.get("log", {})
    tier = log.get("tier", {}) if isinstance(log, dict) else {}
    if isinstance(tier, dict):
        table = {f"tier_{key}": value for key, value in tier.items()} | table
    # A file for the server alone needs no table; other tables are for other programs.
    loose = {key: value for key, value in document.items() if not isinstance(value, dict)}
    # Keys may be written like flags: server-port.
    return {key.replace("-", "_"): value for key, value in (loose | table).items()}, path


def _raw_value(
    setting: Setting,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    table: Mapping[str, Any],
    path: Path,
) -> tuple[Any, str]:
    """Return the raw value of a setting and its origin."""
    if flags.get(setting.name) is not None:
        return flags[setting.name], f"flag {setting.flags[0]}"
    for variable in setting.environment:
        if variable in environ:
            return environ[variable], f"variable {variable}"
    for key in (setting.name, *setting.aliases):
        if key in table:
            return table[key], f"file {path}"
    return setting.default, "default"


def _checked_value(setting: Setting, raw: Any, origin: str) -> Any:
    if raw is None or (setting.optional and str(raw).lower() == OFF):
        return None
    value = _converted(setting, raw)
    valid = value is not None
    if valid and setting.choices:
        valid = value in setting.choices
    if valid and setting.minimum is not None and setting.maximum is not None:
        valid = setting.minimum <= value <= setting.maximum
    if not valid:
        shown = ",".join(map(str, raw)) if isinstance(raw, list | tuple) else raw
        raise ConfigError(
            f"{setting.name} is {shown!r} ({origin}): it must be {setting.allowed}",
            setting=setting.name,
            origin=origin,
        )
    return value


def _converted(setting: Setting, raw: Any) -> Any:
    """Return the value in the setting's type, or None if it is invalid."""
    if setting.many:
        return _several(raw, *READERS[setting.name])
    if setting.kind is bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    if setting.kind is int:
        try:
            if isinstance(raw, str) and not INTEGER.fullmatch(raw):
                return None
            return None if isinstance(raw, bool | float) else int(raw)
        except (TypeError, ValueError):
            return None
    if setting.kind is list:
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            return None
        return tuple(item.strip() for item in items if item.strip())
    if setting.name in QUANTITIES and isinstance(raw, str):
        try:
            QUANTITIES[setting.name](raw)
        except ValueError:
            return None
    return raw if isinstance(raw, str) and raw else None


def _several(raw: Any, read: Callable[[str], str | None], most: int) -> tuple[str, ...] | None:
    """Parse a list of values, given as one string with commas or as several strings."""
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return None
    found = [read(part) for text in texts for part in text.split(",")]
    values = tuple(dict.fromkeys(value for value in found if value is not None))
    return values if values and len(values) <= most and None not in found else None
