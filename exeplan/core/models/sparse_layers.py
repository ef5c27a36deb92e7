"""Mixtures of experts and latent attention, read from a Hugging Face config: sizes alone.

    experts   a router sends each token to a few of many gated MLPs; all tokens may go through shared ones as well
    latent    keys and values are kept as one vector a token that all heads share (DeepSeek-V2, section 2.1)

Configs spell the same numbers differently; the first spelling present is taken. Not here: what they cost
(`layer_costs.py`, and `profiler/datasheets`).

With expert parallelism a token's k of E experts lie among p parts of whole experts. A layer waits for the busiest part
(as in DeepSeek-V3's report, section 3.4): with even routing it has the expected maximum of the rows, and reads that of
the experts touched, which lie anywhere (`fullest.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exeplan.core.models.fullest import fullest
from exeplan.errors import InputError, shown

RUN_SPARSE = ("deepseek_v2", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
"""Families of such layers that the engine runs (`runner/models`)."""
RUN_DENSE = ("gpt2", "llama", "marian", "mistral", "opt", "qwen2", "qwen3", "t5")
"""Families of other layers that it runs."""
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_DENSE_WIDTHS = ("intermediate_size_mlp", "intermediate_size")
_RANKS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model, alike in all layers that have them."""

    count: int
    """In a layer."""
    per_token: int
    """Of them, how many a token goes to."""
    width: int
    """The intermediate size of one."""
    shared_width: int = 0
    """The intermediate size of all that every token goes through, together."""
    num_layers: int
    """Layers that have them; the others are dense."""

    def touched(self, num_tokens: float) -> float:
        """How many experts of a layer a pass of so many tokens reads, on average, where all are as likely."""
        return float(self.count * (1.0 - (1.0 - self.per_token / self.count) ** num_tokens))

    def busiest_rows(self, num_tokens: float, parts: int) -> float:
        """Rows of the products of the busiest of `parts` of whole experts, `per_token` for each token in all."""
        if parts == 1:
            return num_tokens * self.per_token
        rows = self._busiest(num_tokens * self.per_token, parts, drawn=self.per_token)
        return float(min(rows, num_tokens * min(self.per_token, self.count / parts)))

    def busiest_touched(self, num_tokens: float, parts: int) -> float:
        """Experts that a pass of so many tokens reads on the busiest of `parts`, on average."""
        if parts == 1:
            return self.touched(num_tokens)
        touched = self.touched(num_tokens)
        found = self._busiest(touched, parts, drawn=touched)
        return float(min(found, self.count / parts, self.busiest_rows(num_tokens, parts)))

    def _busiest(self, things: float, parts: int, *, drawn: float) -> float:
        """Of things on experts, those of the part that has the most: so many at once are drawn without replacement,
        and lie less unevenly for it than those that are dealt out at random."""
        even = things / parts
        less = math.sqrt(max(self.count - drawn, 0.0) / (self.count - 1))
        return even + (float(fullest(things, parts)) - even) * less

    def copies_sent(self, devices: int, parts: int) -> float:
        """Of a token, how often it goes to another of the devices: to each of those of a part that has one of its
        experts, once."""
        return (devices - 1) * (1.0 - (1.0 - 1.0 / parts) ** self.per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The widths of multi-head latent attention, of one head unless said otherwise."""

    kv_rank: int
    """Of the latent vector of keys and values, which all heads share."""
    query_rank: int | None
    """Of the latent vector of queries; None where they are projected at once."""
    nope_dim: int
    """Of a query and a key, without positions."""
    rope_dim: int
    """Of a query and a key, with positions; all heads share the key's."""
    value_dim: int

    @property
    def kept(self) -> int:
        """Values that a token keeps in a layer: as many on every device of a tensor-parallel group."""
        return self.kv_rank + self.rope_dim

    @property
    def absorbed(self) -> int:
        """Multiplications of one head for a query and one cached token, its projections of keys and values absorbed."""
        return self.kept + self.kv_rank

    def parameters(self, hidden: int, heads: int) -> int:
        """Of all projections of one attention."""
        queries = heads * (self.nope_dim + self.rope_dim)
        up = hidden * queries if self.query_rank is None else self.query_rank * (hidden + queries)
        expand = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return up + hidden * self.kept + expand + heads * self.value_dim * hidden


def experts_of(config: Mapping[str, Any], name: str, *, num_layers: int) -> Experts | None:
    """None for a dense model. Raises InputError naming the field that is missing or wrong."""
    field = next((one for one in _COUNTS if config.get(one) not in (None, 0, 1)), None)
    if field is None:
        return None
    if config.get("is_encoder_decoder"):
        raise InputError(f"config of '{name}' has {field}: experts are planned in decoder-only models only")
    count = _size(config, (field,), name)
    per_token = _size(config, _PER_TOKEN, name)
    if per_token > count:
        raise InputError(f"config of '{name}': a token cannot go to {per_token} of {count} experts")
    width = _size(config, _WIDTHS, name)
    sparse = sum(has_experts(config, layer, name) for layer in range(num_layers))
    if not sparse:
        return None
    return Experts(
        count=count,
        per_token=per_token,
        width=width,
        shared_width=_shared_width(config, width, name),
        num_layers=sparse,
    )


def dense_width(config: Mapping[str, Any], name: str) -> int:
    """The intermediate size of the layers of a mixture of experts that have none."""
    return _size(config, _DENSE_WIDTHS, name)


def latent_of(config: Mapping[str, Any], name: str) -> LatentAttention | None:
    """None for attention that keeps keys and values of each head. Raises InputError as `experts_of`."""
    if not config.get("kv_lora_rank"):
        return None
    if config.get("index_topk"):
        raise InputError(f"config of '{name}' has index_topk: attention to chosen tokens only is not supported")
    rank, nope, rope, value = (_size(config, (field,), name) for field in _RANKS)
    query = config.get("q_lora_rank")
    return LatentAttention(
        kv_rank=rank,
        query_rank=None if query is None else _size(config, ("q_lora_rank",), name),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=value,
    )


def has_experts(config: Mapping[str, Any], layer: int, name: str) -> bool:
    """Whether that layer of a mixture has them.

    By the rules of Qwen (`decoder_sparse_step`), DeepSeek (`first_k_dense_replace`) and Llama 4 (`moe_layers`).
    """
    if isinstance(listed := config.get("moe_layers"), list):
        return layer in listed
    if isinstance(dense := config.get("mlp_only_layers"), list) and layer in dense:
        return False
    for field in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq"):
        if (step := config.get(field)) is not None:
            if type(step) is not int or step < 1:
                raise InputError(f"config of '{name}': {field} must be a positive integer, found {shown(step)}")
            if (layer + (field != "moe_layer_freq")) % step:
                return False
    first = config.get("first_k_dense_replace") or 0
    if type(first) is not int or first < 0:
        raise InputError(
            f"config of '{name}': first_k_dense_replace must be a whole number of at least 0, found {shown(first)}"
        )
    return layer >= first


def _shared_width(config: Mapping[str, Any], width: int, name: str) -> int:
    if config.get("model_type") in ("llama4", "llama4_text"):
        return width
    for field in ("n_shared_experts", "num_shared_experts"):
        if config.get(field):
            return _size(config, (field,), name) * width
    given = next((field for field in _SHARED_WIDTHS if config.get(field)), None)
    return _size(config, (given,), name) if given else 0


def _size(config: Mapping[str, Any], fields: tuple[str, ...], name: str) -> int:
    for field in fields:
        if (value := config.get(field)) is not None:
            if type(value) is not int or not 0 < value <= _MOST:
                raise InputError(
                    f"config of '{name}': {field} must be a positive integer up to {_MOST}, found {shown(value)}"
                )
            return value
    raise InputError(f"config of '{name}' has no {fields[0]}")
