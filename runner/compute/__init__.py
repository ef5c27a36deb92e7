"""One device: a model's shard, its KV cache, and the pass that turns a batch into logits and tokens."""
