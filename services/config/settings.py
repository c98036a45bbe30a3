"""What can be set: one `Setting` for each field of a config dataclass, with its flag, variable and
help.

Names, defaults and help come from the dataclass itself (the sentence of each field in its
docstring), so that there is one place to change. Says nothing of where values come from; `sources`
reads them, `build` makes the config.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.config import values

FieldPath = tuple[str, ...]
"""Where a value goes: names of nested config fields, outermost first."""

ENVIRONMENT_PREFIX = "BATON_"
_OWN_FLAG = re.compile(r" \(`--[a-z-]+`\)")
_FIELD_LINE = re.compile(r"([a-z_][a-z0-9_]*(?:, [a-z_][a-z0-9_]*)*): (.+)")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a field is written where its name and type do not say it.

    name: the flag without dashes; empty takes the field's name.
    parse: how a text becomes a value; None goes by the field's type.
    is_one_word: for a list, whether its parts stand between commas in one word, so that no word after it is taken.
    """

    name: str = ""
    parse: Callable[[str], Any] | None = None
    is_one_word: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set.

    name: the flag without dashes; the variable and the YAML key follow from it.
    paths: the fields that it sets; several where processes must agree.
    parse: how a text becomes a value. is_switch: true or false. is_list: may be given several
    times.
    default: what holds when nobody sets it; None where it must be set or is derived.
    help: one sentence.
    """

    name: str
    paths: tuple[FieldPath, ...]
    parse: Callable[[str], Any]
    default: Any
    help: str
    is_switch: bool = False
    is_list: bool = False

    @property
    def flag(self) -> str:
        """As it is written on a command line."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """As it is written in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper().replace("-", "_")


Spellings = dict[tuple[type, str], Spelling]


def settings_of(
    config: type, spellings: Spellings, leave_out: Iterable[FieldPath] = ()
) -> list[Setting]:
    """The settings of a config dataclass and of those nested in it; `leave_out` names fields or
    whole parts.
    """
    skipped = set(leave_out)
    settings: dict[str, Setting] = {}
    for setting in _iter_settings(config, (), spellings, skipped):
        known = settings.get(setting.name)
        if known is not None:
            setting = dataclasses.replace(known, paths=known.paths + setting.paths)
        settings[setting.name] = setting
    return list(settings.values())


def field_sentences(config: type) -> dict[str, str]:
    """The sentence of each field, as the docstring of its dataclass gives it (`name: sentence`)."""
    sentences: dict[str, str] = {}
    names: list[str] = []
    for line in (config.__doc__ or "").splitlines():
        found = _FIELD_LINE.fullmatch(line.strip())
        if found is not None:
            names = found[1].split(", ")
            sentences |= dict.fromkeys(names, found[2])
        elif line.strip() and names:
            sentences |= {name: f"{sentences[name]} {line.strip()}" for name in names}
        else:
            names = []
    return sentences


def _iter_settings(
    config: type, prefix: FieldPath, spellings: Spellings, skipped: set[FieldPath]
) -> Iterator[Setting]:
    hints = typing.get_type_hints(config)
    sentences = field_sentences(config)
    for field in dataclasses.fields(config):
        path = (*prefix, field.name)
        if path in skipped:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _iter_settings(hints[field.name], path, spellings, skipped)
            continue
        spelling = spellings.get((config, field.name), Spelling())
        kind = hints[field.name]
        yield Setting(
            name=spelling.name or field.name.replace("_", "-"),
            paths=(path,),
            parse=spelling.parse or _parser_of(kind),
            default=_default_of(field),
            help=_OWN_FLAG.sub("", sentences.get(field.name, "")),
            is_switch=kind is bool,
            is_list=typing.get_origin(kind) is tuple and not spelling.is_one_word,
        )


def _parser_of(kind: Any) -> Callable[[str], Any]:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum_parser(kind)
    if typing.get_origin(kind) is tuple:
        return values.parse_list
    known: dict[Any, Callable[[str], Any]] = {
        int: values.parse_integer,
        float: values.parse_number,
        bool: values.parse_switch,
        str: values.parse_text,
        dict[str, float]: values.parse_weights,
    }
    return known[kind]


def _enum_parser(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def parse(text: str) -> StrEnum:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"known: {', '.join(kind)}") from None

    return parse


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None
