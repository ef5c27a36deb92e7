"""Reading workloads: traces, law files, shipped names and laws written on the command line.

    trace.csv, trace.jsonl, either .gz    input_tokens, output_tokens and optionally arrival_s, one request a row; and
                                          the formats of others that `traces.py` lists
    law.yaml                              a law, as a mapping (the files under plans/workloads show it)
    T                                     a shipped workload by its name: ExeGPT's tasks, real traces as quantiles
    normal:in=128,81,256;out=128,68,320   mean, std, maximum of either side; lognormal likewise
    uniform:in=16-240;out=16-240          fixed:in=128;out=64
    quantiles:in=p50:100,p99:900;out=p50:40,p99:600;rank_correlation=0.3

The rank correlation (Spearman) may follow every law; without it the sides are independent. A file that has the name of
a shipped workload is reached by its path (`./T`).
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names
from exeplan.workload.laws import fixed, joint, normal, quantiles, uniform
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.traces import CountTokens, number, read_trace, shown, whole_length
from exeplan.workload.workload import Workload

_FIELDS = {
    "normal": ("mean", "std", "max"),
    "lognormal": ("mean", "std", "max"),
    "uniform": ("min", "max"),
    "fixed": ("tokens",),
}
"""The parameters of each law but `quantiles`, in the order of the short form."""
_LAWS = (*_FIELDS, "quantiles")
_SIDES = {"in": "input", "out": "output"}
_LAW_FILE = ("source", "licence", "input", "output", "rank_correlation")


def load_workload(text: str, count_tokens: CountTokens | None = None) -> Workload:
    """The workload that `text` means: see the module. `count_tokens` is for traces that hold text.

    A law that is asked for again is the same value, for which policies keep what they have computed.
    Raises InputError naming file and row, or the part of a law.
    """
    if ":" in text and text.partition(":")[0] in _LAWS:
        return _written(text)
    return replace(_load(text, count_tokens), reference=text)


@lru_cache(maxsize=32)
def _written(text: str) -> Workload:
    """That of a law written on the command line, in which no file has a part."""
    return replace(_from_mapping(text, _parse_law(text)), reference=text)


def _load(text: str, count_tokens: CountTokens | None) -> Workload:
    if text in shipped_names("workloads"):
        return _from_yaml(text, shipped("workloads", text))
    path = Path(text)
    if not os.path.exists(text):  # Unlike Path.exists, False for what cannot be a path.
        names = ", ".join(shipped_names("workloads"))
        raise InputError(f"no workload '{shown(text)}': no such file, no law ({', '.join(_LAWS)}), none of {names}")
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path.stem, path)
    found = read_trace(path, count_tokens)
    source = "; ".join([f"{path.name}, {len(found.trace.inputs)} requests", *found.remarks])
    return Workload.of_trace(path.name, found.trace, source=source)


# --- laws -------------------------------------------------------------------------------------------------------------


def _from_yaml(name: str, path: Path) -> Workload:
    try:
        return _from_mapping(name, read_yaml(path), path.name)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _from_mapping(name: str, body: Mapping[str, Any], source: str = "") -> Workload:
    if unknown := sorted(str(key) for key in body if key not in _LAW_FILE):
        raise InputError(f"unknown field '{unknown[0]}'; a law has {', '.join(_LAW_FILE)}")
    correlation = number(body.get("rank_correlation", 0), "rank_correlation")
    if not -1 <= correlation <= 1:
        raise InputError(f"rank_correlation must lie between -1 and 1, found {correlation:g}")
    notes = [str(body.get("source", source)).strip()]
    laws = {side: _side(side, body.get(side), notes) for side in ("input", "output")}
    inputs, outputs, weights = joint(laws["input"], laws["output"], correlation)
    source = "; ".join(note for note in notes if note)
    return Workload.of(name, inputs=inputs, outputs=outputs, weights=weights, source=source)


def _side(side: str, body: Any, notes: list[str]) -> LengthLaw:
    """The law of one side; what differs from the words of its author is added to `notes`."""
    if not isinstance(body, Mapping) or len(body) != 1 or next(iter(body)) not in _LAWS:
        raise InputError(f"{side} must be one law ({', '.join(_LAWS)}) with its parameters")
    ((name, parameters),) = body.items()
    try:
        law = _law(name, parameters)
    except InputError as error:
        raise InputError(f"{side}: {error}") from None
    std = float(parameters["std"]) if name in ("normal", "lognormal") else law.std
    if abs(law.std - std) > 0.01 * std:
        notes.append(f"{side} std {std:g} is out of reach, {law.std:.3g} used")
    return law


def _law(name: str, parameters: Any) -> LengthLaw:
    if name == "quantiles":
        return quantiles(_quantile_points(parameters))
    fields = _FIELDS[name]
    if name == "fixed" and not isinstance(parameters, Mapping):
        parameters = {"tokens": parameters}
    if not isinstance(parameters, Mapping) or set(parameters) != set(fields):
        raise InputError(f"{name} takes {', '.join(fields)}; found {shown(parameters)}")
    if name in ("normal", "lognormal"):
        mean, std = (number(parameters[field], field) for field in ("mean", "std"))
        return normal(mean, std, whole_length(parameters["max"], "max"), logarithmic=name == "lognormal")
    lengths = [whole_length(parameters[field], field) for field in fields]
    return fixed(*lengths) if name == "fixed" else uniform(*lengths)


def _quantile_points(parameters: Any) -> dict[float, float]:
    if not isinstance(parameters, Mapping):
        raise InputError(f"quantiles take points such as p50: 100, found {shown(parameters)}")
    points: dict[float, float] = {}
    for key, value in parameters.items():
        percent = number(str(key).removeprefix("p"), f"quantile '{shown(key)}'")
        if not 0 <= percent <= 100 or percent in points:
            raise InputError(f"quantile '{shown(key)}' must be one of p0 to p100, each once")
        points[percent] = whole_length(value, f"p{percent:g}")
    return points


def _parse_law(text: str) -> dict[str, Any]:
    """The short form as the mapping that a law file holds."""
    law, _, rest = text.partition(":")
    body: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(";"))):
        key, equals, value = part.partition("=")
        field = _SIDES.get(key.strip(), key.strip())
        if not equals or field not in ("input", "output", "rank_correlation") or field in body:
            raise InputError(f"'{shown(part)}' is not one of in=, out= and rank_correlation=, each once")
        body[field] = value.strip() if field == "rank_correlation" else {law: _parse_side(law, value)}
    return body


def _parse_side(law: str, value: str) -> dict[str, str]:
    if law != "quantiles":
        fields = _FIELDS[law]
        values = [word.strip() for word in value.split("-" if law == "uniform" else ",")]
        if len(values) != len(fields):
            raise InputError(f"{law} takes {', '.join(fields)}; found '{shown(value)}'")
        return dict(zip(fields, values, strict=True))
    points: dict[str, str] = {}
    for word in value.split(","):
        percent, colon, tokens = word.partition(":")
        if not colon or percent.strip() in points:
            raise InputError(f"quantiles take points such as p50:100, each once; found '{shown(word)}'")
        points[percent.strip()] = tokens.strip()
    return points
