"""Where values come from: flags, then the environment, then a YAML file. The first that names a
setting wins.

Every value is parsed here and a bad one refuses to start, by the name it was written under. Nothing
else in the project reads flags, BATON_* variables or config files.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from services.config import retired
from services.config.settings import ENVIRONMENT_PREFIX, Setting

OWN_VARIABLES = frozenset({"BATON_CONFIG", "BATON_PARENT_PID"})
_CONFIG_FLAG = "--config"


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """Give a parser one flag a setting. Unset ones leave no trace in the namespace."""
    parser.add_argument(_CONFIG_FLAG, metavar="FILE", default=argparse.SUPPRESS, help=_CONFIG_HELP)
    for setting in settings:
        _add_flag(parser, setting)


_CONFIG_HELP = "YAML file with any of these settings, by their names without dashes in front."


def normalise_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments with flag names in one spelling, and without flags that ask for what is the case
    anyway.

    ConfigError answers a retired flag with what to write instead.
    """
    result: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == "--":
            return [*result, argument, *pending]
        argument = retired.SHORT_NAMES.get(argument, argument)
        if not argument.startswith("--"):
            result.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        name = flag[2:].replace("_", "-")
        if not retired.is_retired(name):
            result.append(f"--{name}{equals}{value}")
            continue
        if not equals and pending and not pending[0].startswith("-"):
            value = pending.pop(0)
        if not retired.is_needless(name, value):
            raise retired.refuse(name, f"--{name}")
    return result


def collect(
    settings: Sequence[Setting],
    namespace: argparse.Namespace,
    environment: Mapping[str, str],
    known_elsewhere: Iterable[str] = (),
) -> dict[str, Any]:
    """Setting name -> value, for every setting that flags, environment or YAML name.

    known_elsewhere: setting names of other commands, which a shared file or environment may hold.
    """
    by_name = {setting.name: setting for setting in settings}
    elsewhere = set(known_elsewhere)
    path = getattr(namespace, "config", None) or environment.get("BATON_CONFIG")
    found = _from_yaml(Path(path), by_name, elsewhere) if path else {}
    found |= _from_environment(environment, by_name, elsewhere)
    found |= _from_flags(namespace, by_name)
    return found


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    text = setting.help.replace("%", "%%")
    if setting.default not in (None, "", ()):
        shown = setting.default
        if isinstance(shown, dict):
            shown = json.dumps(shown)
        elif isinstance(shown, tuple):
            shown = ",".join(shown)
        text = f"{text} (default: {shown})"
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if setting.is_switch:
        parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = setting.name.rpartition("-")[2].upper()
    if setting.is_list:
        options |= {"action": "extend", "nargs": "+"}
    parser.add_argument(setting.flag, **options)


def _from_flags(namespace: argparse.Namespace, by_name: Mapping[str, Setting]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, given in vars(namespace).items():
        setting = by_name.get(name)
        if setting is None:
            continue
        if setting.is_switch:
            found[name] = given
        else:
            text = ",".join(given) if setting.is_list else given
            found[name] = _parse(setting.parse, text, setting.flag)
    return found


def _from_environment(
    environment: Mapping[str, str], by_name: Mapping[str, Setting], elsewhere: set[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OWN_VARIABLES:
            continue
        # Kubernetes sets BATON_PORT=tcp://... and more beside every pod of a service named baton.
        if "://" in text and variable.endswith("_PORT"):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
        setting = by_name.get(name)
        if setting is not None:
            found[name] = _parse(setting.parse, text, variable)
        elif name not in elsewhere:
            _refuse_if_misspelt(variable, name, text, by_name)
    return found


def _refuse_if_misspelt(
    variable: str, name: str, text: str, by_name: Mapping[str, Setting]
) -> None:
    """A variable that looks like one of ours must not be ignored in silence; a stranger's may."""
    if retired.is_retired(name):
        if not retired.is_needless(name, text):
            raise retired.refuse(name, variable)
        return
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.85)
    if close:
        raise ConfigError(f"{variable}: unknown; did you mean {by_name[close[0]].variable}?")


def _from_yaml(path: Path, by_name: Mapping[str, Setting], elsewhere: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _load_yaml(path).items():
        name = str(key).replace("_", "-")
        where = f"{path}: {key}"
        setting = by_name.get(name)
        if setting is not None:
            found[name] = _parse(setting.parse, _as_text(value, where), where)
        elif retired.is_retired(name):
            if not retired.is_needless(name, _as_text(value, where)):
                raise retired.refuse(name, where)
        elif name not in elsewhere:
            close = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{where}: unknown setting{hint}")
    return found


def _load_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"--config: {path} is not YAML: {line}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold settings as `name: value`")
    return content


def _as_text(value: object, where: str) -> str:
    """A YAML value as it would stand on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value)
    if value is None:
        raise ConfigError(f"{where}: has no value")
    return str(value)


def _parse(parse: Callable[[str], Any], text: str, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} cannot be used: {error}") from None
