"""A small Llama shape for imported tables, and the files that hold them."""

from collections.abc import Iterable
from pathlib import Path

from exeplan.core.models.model import ModelSpec, model_spec


def toy_spec(name: str, *, intermediate_size: int, vocab_size: int) -> ModelSpec:
    """Two layers of 8 heads of 128, of which 2 hold keys and values."""
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": intermediate_size,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
    }
    return model_spec(config, name=name)


def table(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    """The rows as CSV with the number of each before it, as pandas writes them; packed where the name says so."""
    import pandas

    pandas.DataFrame(list(rows)).to_csv(path)
    return path
