"""A `ModelConfig` as a dictionary that JSON can hold, and back.

A dataclass becomes a dictionary of its fields, with its class's name under "class" (no field can have that name); a tuple becomes a list,
in which a run of equal layers stands once: {"repeat": 30, "of": {...}}. Classes are looked up by name among the frozen dataclasses of
`model.config`, `model.rope` and `model.router`, and fields are those of the class: one that is added there needs no change here.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import types
import typing
from typing import Any

import model.config
import model.rope
import model.router
from model.config import ModelConfig
from runtime import UserError

MAX_REPEAT = 10_000  # layers: a damaged count must not fill the memory
MAX_TOLD = 8  # problems that an error lists

_UNUSABLE = object()  # stands for a value that a problem was reported for


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """The config as dictionaries, lists, strings, numbers, booleans and None.

    Raises:
        TypeError: a field holds anything else, a number that JSON has no word for (inf, nan), or a value of another type than the field's.
    """
    data = _plain(config, ModelConfig.__name__)
    problems: list[str] = []
    if _value(data, ModelConfig.__name__, problems) != config:
        raise TypeError("; ".join(problems) or f"{config!r} would not come back as it is")
    return data


def from_dict(data: Any, source: str = "the config") -> ModelConfig:
    """The config that `to_dict` made `data` from: `from_dict(to_dict(config)) == config`.

    Args:
        data: as `json.load` gives it.
        source: where it comes from (a file's name), for the error.

    Raises:
        UserError: `data` is no such dictionary. Lists classes and fields that are unknown, fields that are missing, values of another
            type than the field's, and what the classes themselves refuse.
    """
    problems: list[str] = []
    try:
        config = _value(data, ModelConfig.__name__, problems)
    except RecursionError:
        raise UserError(f"{source} is damaged: it is nested too deeply for a model; convert the model again") from None
    if not problems and not isinstance(config, ModelConfig):
        problems.append(f"it is no {ModelConfig.__name__}")
    if problems:
        told = [*problems[:MAX_TOLD], *[f"and {len(problems) - MAX_TOLD} more"] * (len(problems) > MAX_TOLD)]
        raise UserError(
            f"{source} is no model that this version of Diptych knows: {'; '.join(told)}. Update Diptych, or convert the model again"
        )
    return config


@functools.cache
def _classes() -> dict[str, type]:
    homes = [vars(home).items() for home in (model.config, model.rope, model.router)]
    known = {name: each for home in homes for name, each in home if inspect.isclass(each) and dataclasses.is_dataclass(each)}
    return {name: each for name, each in known.items() if each.__dataclass_params__.frozen}


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    """The type of each field that the class is made from."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


@functools.cache
def _required(cls: type) -> frozenset[str]:
    """The fields without a default: others may be absent, as what was stored before there was such a field."""
    nothing = dataclasses.MISSING
    return frozenset(f.name for f in dataclasses.fields(cls) if f.init and f.default is nothing and f.default_factory is nothing)


def _plain(value: Any, where: str) -> Any:
    cls = type(value)
    if _classes().get(cls.__name__) is cls:
        return {"class": cls.__name__} | {name: _plain(getattr(value, name), f"{where}.{name}") for name in _fields(cls)}
    if isinstance(value, tuple):
        runs = [(item, len(list(run))) for item, run in itertools.groupby(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))]
        return [
            each
            for item, n in runs
            for each in ([{"repeat": n, "of": item}] if n > 1 and isinstance(item, dict) else itertools.repeat(item, n))
        ]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise TypeError(f"{where} holds {value!r}, which JSON can't")


def _value(data: Any, where: str, problems: list[str]) -> Any:
    """What `data` stands for, or `_UNUSABLE` once the reason is in `problems`."""
    if isinstance(data, dict):
        return _instance(data, where, problems)
    if isinstance(data, list):
        items: list[Any] = []
        for i, each in enumerate(data):
            count = 1
            if isinstance(each, dict) and each.keys() == {"repeat", "of"}:
                count, each = each["repeat"], each["of"]
                if type(count) is not int or not 1 <= count <= MAX_REPEAT:
                    problems.append(f"{where}[{i}] repeats {count!r} times (1 to {MAX_REPEAT} are possible)")
                    count = 1
            items += [_value(each, f"{where}[{i}]", problems)] * count
        return _UNUSABLE if _UNUSABLE in items else tuple(items)
    return data


def _instance(data: dict[str, Any], where: str, problems: list[str]) -> Any:
    name = data.get("class")
    if not isinstance(name, str) or name not in _classes():
        problems.append(f"{where} has class {name!r}, which is unknown")
        return _UNUSABLE
    cls = _classes()[name]
    hints, before = _fields(cls), len(problems)
    problems += [f"{where} ({name}) has unknown field {field!r}" for field in sorted(data.keys() - hints.keys() - {"class"})]
    problems += [f"{where} ({name}) lacks field {field!r}" for field in sorted(_required(cls) - data.keys())]
    values = {field: _value(data[field], f"{where}.{field}", problems) for field in hints if field in data}
    for field, value in values.items():
        if value is not _UNUSABLE and not _fits(value, hints[field]):
            problems.append(f"{where}.{field} is {_short(value)}, no {_short(hints[field])}")
    if len(problems) > before:
        return _UNUSABLE
    try:
        return cls(**values)
    except (UserError, ArithmeticError, TypeError, ValueError) as error:
        problems.append(f"{where}: {error}")
        return _UNUSABLE


def _fits(value: Any, hint: Any) -> bool:
    """Whether a field of type `hint` may hold the value. A type that JSON values can't be told by is not judged."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1:] == (...,):
            return all(_fits(each, arguments[0]) for each in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, bool, str, types.NoneType):
        return type(value) is hint
    return not inspect.isclass(hint) or isinstance(value, hint)


def _short(value: Any) -> str:
    text = value.__name__ if inspect.isclass(value) else str(value) if typing.get_origin(value) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
