"""Handover: the pieces in which the keys and values of a prefill go to the stages that decode.

A piece is some layers of a stage, sent as soon as the pass has left the last of them (ExeGPT, ASPLOS 2024, section 4.1:
transfers overlap with computation), and large enough that its bytes cost more than its message. Runner and simulator
share this. Not here: which worker has which heads (`runner/distributed/kv_transfer.py`).
"""

from itertools import pairwise

PIECE_BYTES = 1 << 20
"""A worker sends no smaller piece, unless there is nothing more to send."""


def num_pieces(num_layers: int, layer_bytes: float) -> int:
    """In how many pieces so many layers are sent, at least one layer each."""
    return max(1, min(num_layers, int(num_layers * layer_bytes / PIECE_BYTES)))


def pieces(layers: tuple[int, int], layer_bytes: float) -> list[tuple[int, int]]:
    """The layers of a stage by piece, of nearly equal size, where one worker's share of a layer has so many bytes."""
    first, last = layers
    count = num_pieces(last - first, layer_bytes)
    return list(pairwise(first + (last - first) * number // count for number in range(count + 1)))


def num_receivers(shares: int, senders: int, receivers: int) -> int:
    """How often a device that prefills sends what it has, where so many prefill and so many decode the same layers.

    More than once where more devices decode than there are key/value heads (`shares`, 1 of latent attention); of
    several devices that have the same head they take turns.
    """
    return -(-max(receivers, shares) // max(senders, shares))
