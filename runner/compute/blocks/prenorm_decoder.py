"""PreNormDecoder: a decoder in Llama's order, of layers that a family makes.

Rotary positions; RMSNorm before attention and before the feed-forward block of each layer, and before an output head
that may be tied to the embedding. Not here: attention and feed-forward blocks, which are a family's own.
"""

from collections.abc import Callable

from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.runner.compute.blocks.layers import Attend, Block, LastLayer, RMSNorm, added, wanted_rows
from exeplan.runner.compute.blocks.rotary import Angles, Rotary
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Shard
from exeplan.runner.compute.weights.vocabulary import Vocabulary

PREFIX = "model."
EMBEDDING, NORM, HEAD, LAYER = "model.embed_tokens.weight", "model.norm", "lm_head.weight", "model.layers.{}"
"""Of tensors; within a layer input_layernorm and post_attention_layernorm, besides those of its blocks."""
EPS = 1e-6
"""Of norms, where a config has none."""
Attention = Callable[[Tensor, Angles | None, Attend], Tensor]
"""Of the normed hidden states `[N, E]`, with the product behind it."""


class PreNormLayer:
    def __init__(
        self, spec: ModelSpec, weights: Weights, name: str, attention: Attention, mlp: Block, *, eps: float = EPS
    ) -> None:
        """`name` is that of the layer in a checkpoint, `eps` the norms' where the config has none."""
        eps = spec.config.get("rms_norm_eps", eps)
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", spec.hidden_size, eps)
        self.attention = attention
        self.post_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", spec.hidden_size, eps)
        self.mlp = mlp

    def __call__(
        self, hidden_NE: Tensor, angles: Angles | None, attend: Attend, wanted_R: Tensor | None = None
    ) -> Tensor:
        residual_RE, attend = wanted_rows(hidden_NE, attend, wanted_R)
        attended_RE = self.attention(self.input_norm(hidden_NE), angles, attend)
        return added(self.mlp, self.post_norm.of_sum(attended_RE, residual_RE), residual_RE)


class PreNormDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        shard: Shard,
        rotary: Rotary,
        layer: Callable[[int], PreNormLayer],
        *,
        eps: float = EPS,
    ) -> None:
        """`layer` makes the layer with a number."""
        head = EMBEDDING if spec.config.get("tie_word_embeddings", False) else HEAD
        self.vocabulary = Vocabulary(weights, shard, EMBEDDING, head, spec.vocab_size, spec.hidden_size)
        self.angles = rotary
        self.layers: list[LastLayer] = [layer(index) for index in range(*shard.layers)]
        if shard.last:
            self.norm = RMSNorm(weights, NORM, spec.hidden_size, spec.config.get("rms_norm_eps", eps))

    def embed(self, token_N: Tensor, _position_N: Tensor) -> Tensor:
        return self.vocabulary.embed(token_N)

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.vocabulary.logits(self.norm(hidden_RE))
