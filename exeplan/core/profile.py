"""Profile: what one layer costs on one device, as measurements; one readable JSON file.

A measurement is one row: `attention` and `rest` are one layer each, `embed`, `head`, `overhead` and `control` one
iteration each.

    op         phase    axes                        meaning
    attention  prefill  num_seqs, num_tokens        KV store and attention of num_seqs prompts, num_tokens in all
    attention  decode   num_seqs, context_tokens    one new token a sequence, context_tokens in the cache in all
    rest       (both)   num_tokens                  the layer without its attention; of an encoder-decoder model
                                                    prefill: an encoder layer, with its share of the decoder's keys and
                                                    values of the prompt; decode: a decoder layer
                                                    (a decoder-only one's passes with prompts, and those without, may
                                                    be apart too: `engine_constants.py`)
    embed      (both)   num_tokens                  token and position embedding
    head       (both)   num_seqs                    final norm, output head and sampling of num_seqs rows
    overhead   decode   num_seqs                    scheduling, batch preparation and bookkeeping of an iteration
    overhead   prefill  num_seqs, num_tokens        the same for a prefill
    control    (both)   num_seqs                    what an iteration takes beyond where workers run it, between the end
                                                    of its last stage and the start of the next one's first
    pass       alone    num_seqs, context_tokens    a decode pass of one of several devices while the others wait;
                                                    together: while all compute
    all_reduce intra    bytes                       sum over tensor_parallel_size devices of one node; inter: of several
    send       intra    bytes                       from one device to another of its node; inter: to another node
    dense      (both)   num_tokens                  a mixture's layer without its attention and its routed experts
    experts    (both)   num_tokens                  the routed experts alone, on the busiest device: tokens of all ranks
    all_to_all intra    bytes                       tokens to their experts, or back: what each of that many devices
                                                    sends to others of its node; inter: to other nodes

The last three are of layouts with attention data parallelism (`Sharding`). `rest` rows of an expert_parallel_size above
1 have all tokens on every device, as without it, and whole experts on each. Rows hold at one tensor_parallel_size:
`attention`, `rest`, `dense`, `embed` and `head` are one device's shard then, without communication; `overhead` holds at
larger ones too, up to the next that has rows. An encoder-decoder model's `attention decode` is a decoder layer's own
and cross attention together, over all tokens in both of its caches. Times are medians in seconds.

Not here: interpolation (`simulator/cost.py`) and measuring (`profiler/`).
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from exeplan.core.correction import Correction, correction_from
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec, model_reference, model_reference_from, model_spec
from exeplan.core.models.uneven_routing import check_uneven
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.files import read_json, write_text

COMPUTE_OPS = ("attention", "rest", "embed", "head", "overhead")
LINK_OPS = ("all_reduce", "send", "all_to_all")
EXPERT_OPS = ("dense", "experts")
"""Of layouts with attention data parallelism."""
OPS = (*COMPUTE_OPS, "control", "pass", *EXPERT_OPS, *LINK_OPS)
COMPUTE_PHASES = ("prefill", "decode", "", "alone", "together")
LINKS = ("intra", "inter")
"""Phases of the two operations that communicate: inside a node and between nodes."""
_AXES = {
    ("attention", "prefill"): ("num_seqs", "num_tokens"),
    ("attention", "decode"): ("num_seqs", "context_tokens"),
    ("rest", ""): ("num_tokens",),
    ("embed", ""): ("num_tokens",),
    ("head", ""): ("num_seqs",),
    ("overhead", "decode"): ("num_seqs",),
    ("overhead", "prefill"): ("num_seqs",),
}
"""The measurements that a profile must hold, and the axes that each of their rows needs."""
_MORE_AXES = {
    ("control", ""): ("num_seqs",),
    ("pass", "alone"): ("num_seqs", "context_tokens"),
    ("pass", "together"): ("num_seqs", "context_tokens"),
    ("dense", ""): ("num_tokens",),
    ("experts", ""): ("num_tokens",),
}
"""The same of those that it may hold."""
_LARGEST = 1e30
"""Above any bytes, seconds or rates there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What was measured. Rates are ceilings measured on the device itself; they bound every believable row."""

    name: str
    kind: str
    """`cpu` or `cuda`."""
    memory_bytes: int
    num_threads: int = 1
    copy_bytes_per_second: float
    flops_per_second: float
    cache_bytes: int = 0
    """The last-level cache; weights and keys that fit it may be read faster than they are copied in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One timed point; axes that do not apply are 0."""

    op: str
    phase: str = ""
    num_seqs: int = 0
    num_tokens: int = 0
    context_tokens: int = 0
    tensor_parallel_size: int = 1
    bytes: int = 0
    seconds: float
    spread: float = 0.0
    """Half the interquartile range over the median."""
    repeats: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Of `rest` and `experts` rows (see `Sharding`)."""

    @property
    def sharding(self) -> Sharding:
        """Of an `all_to_all` row, all its devices count as tensor parallel."""
        return Sharding(self.tensor_parallel_size, self.data_parallel_size, self.expert_parallel_size)


_DEFAULTS = {f.name: f.default for f in fields(Measurement)}
_ADDED = ("data_parallel_size", "expert_parallel_size")
"""Fields that a fingerprint has only where they are not 1, so that those of older profiles stay the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """A canonical pass of the model; the profile says how long it took, so that a run can tell how fast it is."""

    kind: str
    """`decode` or `prefill`."""
    num_seqs: int
    num_tokens: int
    """Of each sequence: in the cache, or in the prompt."""
    num_layers: int
    seconds: float = 1.0
    """The geometric mean while the profile was measured."""
    error: float = 0.0
    """Its standard error, relative."""


UNSURE = (
    "how sure the profile's times are is not known: one burst of whole steps was timed, more take a longer --budget"
)
"""Of a profile that was measured, and has no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one model shape on one device in one dtype."""

    model: ModelSpec
    dtype: str
    device: Device
    weight_bytes: int
    """Resident bytes of the weights as the engine holds them."""
    workspace_bytes: int
    """Kept free on each device besides weights, keys and values: measured, the peak of activations at the largest
    prefill; with `runtime_bytes`, what that and passes of 8192 tokens take on one device."""
    measurements: tuple[Measurement, ...] = field(repr=False)
    layer_weight_bytes: int | None = None
    """Of them those of a layer, the mean of all, where a checkpoint's layers are quantized and what is around them is
    not; None where all weights are of one dtype."""
    kv_dtype: str | None = None
    """Of keys and values, where it is not the same."""
    runtime_bytes: int | None = None
    """What driver and libraries hold on each GPU. Given, plans count what passes take by their tokens and placement
    (`pass_memory.py`), as exeplan's engine does on a GPU; None: all placements keep `workspace_bytes` free."""
    calibration: float = 1.0
    """Whole steps of the engine over the sum of their parts, both measured in the same minutes; scales predictions."""
    prefill_calibration: float = 1.0
    """The same of what prefills add to their passes, over that; 1 where the steps do not show that they differ."""
    kept_rows_calibration: float | None = None
    """`calibration` of passes that decode the same rows until all are done, finished ones too; None where it is the
    same."""
    pass_seconds: float = 0.0
    """What a step takes beside its parts, whatever it computes, before `calibration`; 0 where the steps show none."""
    calibration_error: float = 0.0
    """The standard error of `calibration`, relative."""
    last_layer_saving: float = 0.0
    """Of a layer's `rest` the part behind its attention, where the engine's last layer computes that only for tokens
    whose next token is wanted, and for none inside a prompt; 0 where it computes all, as other engines do."""
    kept_rows_error: float = 0.0
    """That of `kept_rows_calibration`."""
    reference_passes: tuple[ReferencePass, ...] = field(default=(), repr=False)
    """What the machine's speed is told by; () where it was not watched."""
    speed_spread: float = 0.0
    """How far the machine's speed moved meanwhile, from slow to fast, half of it and relative (`machine_speed.py`)."""
    routing: str | None = None
    """How unevenly tokens choose experts, such as `power_law_1.2`; None where it is even, or was not stated."""
    correction: Correction | None = None
    """How the times change by what measured serving runs said of them; the rows are those before it."""
    source: str = "measured"
    """`measured`, or where the times come from: `datasheet a100-80gb`, `imported vidur`."""
    more_threads: tuple["Profile", ...] = ()
    """The same with other numbers of threads a process, on a CPU; `with_threads` takes one of all."""
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    complete: bool = True
    """False while a run is interrupted; `exeplan profile` with the same file resumes it."""
    reference: str | None = field(default=None, compare=False, repr=False)
    """The file that it was read from."""

    @property
    def engine(self) -> str:
        """The serving engine whose times these are; '' of kernels alone and of exeplan's own engine."""
        before, _, name = self.source.rpartition(" with ")
        return name if before else ""

    def error_of(self, *, keeps_finished_rows: bool) -> float:
        """The standard error of whole steps over their parts, relative, for a policy that keeps its rows or not.

        0 where one burst alone tells none.
        """
        return self.kept_rows_error if keeps_finished_rows and self.kept_rows_calibration else self.calibration_error

    @property
    def cache_dtype(self) -> str:
        """What keys and values are kept in."""
        return self.kv_dtype or self.dtype

    @property
    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Degrees at which a layer was timed, rising."""
        rows = (m for m in self.measurements if m.op == "rest" and m.expert_parallel_size == 1)
        return tuple(sorted({m.tensor_parallel_size for m in rows}))

    @property
    def expert_shardings(self) -> tuple[Sharding, ...]:
        """Layouts with expert parallelism or attention data parallelism that were timed: those that the engine runs of
        which the profile is; rising, none where it runs none."""
        rows = (m for m in self.measurements if m.op == "experts" or (m.op == "rest" and m.expert_parallel_size > 1))
        return tuple(sorted({m.sharding for m in rows}))

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Numbers of threads a process that were profiled, its own first."""
        return (self.device.num_threads, *(one.device.num_threads for one in self.more_threads))

    def with_threads(self, num_threads: int) -> "Profile":
        """The profile of that number of threads alone; itself where it is of one number, whichever that is. Raises
        InputError for a number that was not profiled."""
        if not self.more_threads:
            return self
        for one in (self, *self.more_threads):
            if one.device.num_threads == num_threads:
                return replace(one, model=self.model, reference=self.reference, more_threads=())
        counts = ", ".join(map(str, self.thread_counts))
        raise InputError(f"{self.reference or 'the profile'} has {counts} threads a process, the plan {num_threads}")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides a prediction."""
        rows = [
            {name: getattr(m, name) for name in _DEFAULTS if name not in _ADDED or getattr(m, name) != 1}
            for m in self.measurements
        ]
        body = [self.model.fingerprint, self.dtype, asdict(self.device), self.weight_bytes, self.calibration, rows]
        body += [self.kv_dtype] if self.kv_dtype else []
        body += [self.layer_weight_bytes] if self.layer_weight_bytes else []
        body += [self.prefill_calibration] if self.prefill_calibration != 1.0 else []
        body += [f"{self.kept_rows_calibration} of kept rows"] if self.kept_rows_calibration else []
        body += [f"{self.pass_seconds} a pass"] if self.pass_seconds else []
        body += [asdict(self.correction)] if self.correction else []
        body += [f"{self.last_layer_saving} of the last layer"] if self.last_layer_saving else []
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


_OPTIONAL = (
    "layer_weight_bytes",
    "runtime_bytes",
    "prefill_calibration",
    "kept_rows_calibration",
    "pass_seconds",
    "calibration_error",
    "kept_rows_error",
    "last_layer_saving",
    "speed_spread",
    "routing",
)
_FROM_ZERO = {
    **dict.fromkeys(("speed_spread", "calibration_error", "kept_rows_error", "pass_seconds"), _LARGEST),
    "last_layer_saving": 1.0,
}
"""Numbers of at least 0, and what they are below."""
_OPTIONAL_POSITIVE = ("layer_weight_bytes", "runtime_bytes", "kept_rows_calibration")
_OBJECTS = ("model", "device", "measurements", "reference", "reference_passes", "correction", "more_threads")
_PROFILE_DEFAULTS = {f.name: f.default for f in fields(Profile)}


def save_profile(profile: Profile, path: Path) -> None:
    """Writes the profile as JSON, one measurement a line."""
    write_text(path, f"{_text(profile, path)}\n")


def _text(profile: Profile, path: Path) -> str:
    head = {
        "exeplan_profile": 1,
        "model": {
            "name": profile.model.name,
            **({"reference": model_reference(profile.model.reference, path)} if profile.model.reference else {}),
            "fingerprint": profile.model.fingerprint,
            "config": profile.model.config,
        },
        **{
            name: getattr(profile, name)
            for name in ("dtype", "weight_bytes", "workspace_bytes", "calibration", "source", "created", "complete")
        },
        **{name: getattr(profile, name) for name in _OPTIONAL if getattr(profile, name) != _PROFILE_DEFAULTS[name]},
        **({"reference_passes": [asdict(one) for one in profile.reference_passes]} if profile.reference_passes else {}),
        **({"kv_dtype": profile.kv_dtype} if profile.kv_dtype else {}),
        **({"correction": asdict(profile.correction)} if profile.correction else {}),
        "device": asdict(profile.device),
        "versions": dict(profile.versions),
    }
    rows = ",\n".join(
        f"    {json.dumps({k: v for k, v in asdict(m).items() if v != _DEFAULTS.get(k)})}" for m in profile.measurements
    )
    text = f'{json.dumps(head, indent=2, default=str)[:-2]},\n  "measurements": [\n{rows}\n  ]'
    if profile.more_threads:
        others = ",\n".join(_text(one, path) for one in profile.more_threads)
        text += f',\n  "more_threads": [\n{others}\n  ]'
    return f"{text}\n}}"


def load_profile(path: Path) -> Profile:
    """Reads and checks a profile. Raises InputError naming the row or field that is wrong."""
    return _profile(read_json(path), path)


def _profile(body: Mapping[str, Any], path: Path) -> Profile:
    if body.get("exeplan_profile") != 1:
        raise InputError(f"{path} is not an exeplan profile; make one with `exeplan profile MODEL -o {path}`")
    try:
        rows = tuple(_measurement(row, index, path) for index, row in enumerate(body["measurements"], start=1))
        profile = Profile(
            model=_model(body["model"], path),
            reference=str(path),
            device=Device(**body["device"]),
            measurements=rows,
            reference_passes=tuple(ReferencePass(**one) for one in body.get("reference_passes", ())),
            correction=correction_from(body["correction"], path) if body.get("correction") else None,
            more_threads=tuple(_profile(one, path) for one in body.get("more_threads", ())),
            **{f.name: body[f.name] for f in fields(Profile) if f.name not in _OBJECTS and f.name in body},
        )
    except KeyError as error:
        raise InputError(f"{path} is not a whole profile: it lacks {error}") from None
    except (TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a profile: {error}") from None
    _check_values(profile, path)
    if not profile.model.matches(body["model"].get("fingerprint")):
        raise InputError(
            f"{path}: the model's config does not match its fingerprint, so the file was edited or damaged"
        )
    for op, phase in _AXES:
        if not any(m.op == op and phase in ("", m.phase) for m in rows):
            what = f"{op} {phase}".strip()
            raise InputError(f"{path} holds no '{what}' measurement; run `exeplan profile` again")
    _check_phases(rows, path)
    if len(set(profile.thread_counts)) < 1 + len(profile.more_threads):
        raise InputError(f"{path} holds two profiles of one number of threads; run `exeplan profile` again")
    return profile


def _check_phases(rows: Iterable[Measurement], path: Path) -> None:
    """Raises InputError for products of one phase that have no rows of the other."""
    phases: dict[tuple[str, Sharding], set[str]] = defaultdict(set)
    for m in rows:
        if m.op in ("rest", *EXPERT_OPS):
            phases[m.op, m.sharding].add(m.phase)
    for (op, sharding), there in phases.items():
        if lacking := [phase for phase in ("prefill", "decode") if not there & {"", phase}]:
            where = f"tensor_parallel_size {sharding.tensor_parallel_size}"
            raise InputError(f"{path} holds no '{op} {lacking[0]}' measurement of {where}; run `exeplan profile` again")


def _model(body: Mapping[str, Any], path: Path) -> ModelSpec:
    """The sizes; weights are found by the reference (`load_model_spec`), and need not be on this machine."""
    reference = body.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise InputError(f"{path}: the model's reference must be text, found {reference!r}")
    found = None if reference is None else model_reference_from(reference, path)
    return model_spec(body["config"], name=body["name"], reference=found)


def _check_values(profile: Profile, path: Path) -> None:
    device = profile.device
    positive = {
        "weight_bytes": profile.weight_bytes,
        "workspace_bytes": profile.workspace_bytes,
        "calibration": profile.calibration,
        "prefill_calibration": profile.prefill_calibration,
        **{name: getattr(device, name) for name in ("memory_bytes", "copy_bytes_per_second", "flops_per_second")},
        "num_threads": device.num_threads,
        **{name: value for name in _OPTIONAL_POSITIVE if (value := getattr(profile, name)) is not None},
    }
    for name, value in positive.items():
        if not _is_positive(value):
            raise InputError(f"{path}: {name} must be a positive number, found {value!r}")
    _check_reference_passes(profile, path)
    for name, most in _FROM_ZERO.items():
        value = getattr(profile, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
            limit = "" if most == _LARGEST else f" and below {most:g}"
            raise InputError(f"{path}: {name} must be a number of at least 0{limit}, found {value!r}")
    if not isinstance(profile.dtype, str) or profile.dtype not in DTYPE_BYTES:
        raise InputError(f"{path}: dtype must be one of {', '.join(DTYPE_BYTES)}, found {profile.dtype!r}")
    if profile.kv_dtype is not None and (not isinstance(profile.kv_dtype, str) or profile.kv_dtype not in DTYPE_BYTES):
        raise InputError(f"{path}: kv_dtype must be one of {', '.join(DTYPE_BYTES)}, found {profile.kv_dtype!r}")
    if profile.routing is not None:
        _check_routing(profile, path)
    texts = {"model name": profile.model.name, "device name": device.name, "device kind": device.kind}
    for name, text in {**texts, "source": profile.source}.items():
        if not isinstance(text, str):
            raise InputError(f"{path}: {name} must be text, found {text!r}")


def _check_routing(profile: Profile, path: Path) -> None:
    try:
        check_uneven(profile.routing)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if profile.model.experts is None:
        raise InputError(f"{path}: routing '{profile.routing}' is of mixtures of experts, and its model is none")


def _check_reference_passes(profile: Profile, path: Path) -> None:
    for index, one in enumerate(profile.reference_passes, start=1):
        sizes = (one.num_seqs, one.num_tokens, one.num_layers)
        if one.kind not in ("decode", "prefill") or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise InputError(f"{path}: reference pass {index} has an unknown kind or a size below 1")
        if one.num_layers > profile.model.num_layers or one.num_tokens >= profile.model.max_context:
            raise InputError(f"{path}: reference pass {index} is larger than the model")
        if not _is_positive(one.seconds):
            raise InputError(f"{path}: reference pass {index} has seconds {one.seconds!r}, not a positive number")
        if isinstance(one.error, bool) or not isinstance(one.error, int | float) or not one.error >= 0:
            raise InputError(f"{path}: reference pass {index} has the error {one.error!r}, not a number of at least 0")


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < _LARGEST


def _measurement(row: Any, index: int, path: Path) -> Measurement:
    try:
        m = Measurement(**row)
    except TypeError as error:
        raise InputError(f"{path}: measurement {index} is malformed: {error}") from None
    if m.op not in OPS or m.phase not in (LINKS if m.op in LINK_OPS else COMPUTE_PHASES):
        raise InputError(f"{path}: measurement {index} has unknown op '{m.op}' or phase '{m.phase}'")
    axes = (m.num_seqs, m.num_tokens, m.context_tokens, m.bytes, *m.sharding)
    if any(isinstance(a, bool) or not isinstance(a, int) or a < 0 for a in axes):
        raise InputError(f"{path}: measurement {index} has a size that is not a whole number of at least 0")
    if min(m.sharding) < 1 or (m.op in LINK_OPS and m.bytes < 1):
        raise InputError(f"{path}: measurement {index} ({m.op}) needs a tensor_parallel_size, or bytes, of at least 1")
    for (op, phase), needed in (_AXES | _MORE_AXES).items():
        if m.op == op and phase in ("", m.phase) and any(getattr(m, axis) < 1 for axis in needed):
            raise InputError(f"{path}: measurement {index} ({op}) needs {' and '.join(needed)} of at least 1")
    if not _is_positive(m.seconds):
        raise InputError(f"{path}: measurement {index} has seconds {m.seconds!r}, which must be a positive number")
    return m
