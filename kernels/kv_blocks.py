"""Compaction of the KV cache: moves whole blocks in all layers at once.

Letters: L layers, K key/value heads, S slots, R = K * S rows, D head_dim, P moves.

Adjacent blocks are read as a stream; moves make scattered blocks adjacent. Bytes: 4 * P * L * K *
BLOCK_SIZE * D elements, read once and written once; no operations. A block is BLOCK_SIZE * D adjacent elements for each
layer and head, of keys and of values. The cache decides which blocks move.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, next_power_of_2, tl


def move_blocks(tables_L2RD: Tensor, from_P: Tensor, to_P: Tensor, *, num_kv_heads: int) -> None:
    """Copies block `from_P[p]` to `to_P[p]` (int32 or int64), all at the same time.

    No move may write a block that another move reads or writes: a circular move takes two calls and a free block.
    """
    assert tables_L2RD.is_contiguous()
    layers, _, rows, head_dim = tables_L2RD.shape
    if not layers * len(from_P):
        return
    size = BLOCK_SIZE * head_dim
    _move[(len(from_P), layers * 2 * num_kv_heads)](
        tables_L2RD,
        from_P,
        to_P,
        rows // num_kv_heads * head_dim,
        SIZE=size,
        BLOCK=next_power_of_2(size),
        num_warps=min(8, max(1, next_power_of_2(size) // 512)),
    )


def move_blocks_reference(tables_L2RD: Tensor, from_P: Tensor, to_P: Tensor, *, num_kv_heads: int) -> None:
    layers, _, _, head_dim = tables_L2RD.shape
    blocks = tables_L2RD.view(layers * 2 * num_kv_heads, -1, BLOCK_SIZE * head_dim)
    blocks[:, to_P.long()] = blocks[:, from_P.long()]


@jit
def _move(tables, sources, targets, head_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    move, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source, target = tl.load(sources + move).to(tl.int64), tl.load(targets + move).to(tl.int64)
    i = tl.arange(0, BLOCK)
    start = tables + head * head_stride + i
    tl.store(start + target * SIZE, tl.load(start + source * SIZE, mask=i < SIZE), mask=i < SIZE)


KERNELS = (
    Kernel("move_blocks", move_blocks, "cuda", MODEL_DTYPES),
    Kernel("move_blocks", move_blocks_reference),
)
