"""Frames arrive whole, in order and typed, whatever pieces they come in; what does not fit its channel is refused."""

import asyncio
import io
import math
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.errors import InputError
from exeplan.runner.ipc.frames import HEADER, Channel, MessageError, frame
from exeplan.runner.ipc.messages import (
    ENGINE_COMMANDS,
    ENGINE_EVENTS,
    Abort,
    EngineBroken,
    EngineDown,
    EngineReady,
    EngineUp,
    Event,
    GetLengthStats,
    IterationDone,
    Logprob,
    PlanSwitched,
    Stats,
    Submit,
)

EVENT = Event(
    request_id="7-0",
    token_ids=[5],
    text="\N{SNOWMAN}",
    finish_reason=None,
    first=True,
    arrival=1.0,
    start=1.5,
    time=2.0,
    num_prompt_tokens=3,
    logprobs=[Logprob(5, -0.5, ((5, -0.5), (6, -math.inf)))],
)
events = st.one_of(
    st.builds(EngineDown, message=st.text()),
    st.builds(EngineReady, num_blocks=st.integers(0, 2**63 - 1), request_tokens=st.integers(0, 2**63 - 1)),
    st.just(EngineUp()),
    st.just(IterationDone(events=[EVENT], stats=Stats(num_running=1))),
)


@given(messages=st.lists(events, max_size=4))
def test_messages_come_back_in_order_and_end_in_none(messages):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(map(frame, messages)))
        ours.shutdown(socket.SHUT_WR)
        assert [ENGINE_EVENTS.read(theirs.recv) for _ in messages] == messages
        assert ENGINE_EVENTS.read(theirs.recv) is None


def test_a_message_larger_than_any_buffer_comes_whole():
    ours, theirs = socket.socketpair()
    message = Abort(request_ids=[str(n) for n in range(200_000)])
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(frame(message),))
        sender.start()
        assert ENGINE_COMMANDS.read(theirs.recv) == message
        sender.join()


def test_an_asynchronous_reader_gets_the_same():
    async def read() -> list[object]:
        stream = asyncio.StreamReader()
        stream.feed_data(frame(EngineUp()) + frame(EngineReady(num_blocks=3, request_tokens=48)))
        return [await ENGINE_EVENTS.read_from(stream) for _ in range(2)]

    assert asyncio.run(read()) == [EngineUp(), EngineReady(num_blocks=3, request_tokens=48)]


def test_a_connection_that_ends_within_a_frame_has_ended():
    data = frame(EngineDown(message="gone"))
    for size in range(len(data)):
        assert ENGINE_EVENTS.read(io.BytesIO(data[:size]).read) is None


def test_a_float_of_numpy_is_a_float():
    switched = PlanSwitched(
        number=1, num_blocks=2, request_tokens=32, seconds=np.float64(0.5), num_recomputed=0, num_carried=0
    )
    assert ENGINE_EVENTS.read(io.BytesIO(frame(switched)).read) == switched
    with pytest.raises(TypeError, match="int64 is no part of a message"):
        frame(EngineReady(num_blocks=np.int64(3), request_tokens=48))


def test_a_number_that_no_message_holds_is_an_input_error():
    with pytest.raises(InputError, match="EngineReady holds an integer of more than 64 bits"):
        frame(EngineReady(num_blocks=2**64, request_tokens=48))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", r"a message of 0 bytes does not fit EngineCommand: Input data was truncated"),
        (b"GET / HTTP/1.1", r"a message of 14 bytes does not fit EngineCommand: "),
        (frame(EngineBroken(message="", final=False))[4:], r"does not fit EngineCommand: Invalid value 'EngineBroken'"),
        (frame(EngineUp())[4:] * 2, r"does not fit EngineCommand: "),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(body, sentence):
    with pytest.raises(MessageError, match=sentence) as raised:
        ENGINE_COMMANDS.read(io.BytesIO(HEADER.pack(len(body)) + body).read)
    assert "\n" not in str(raised.value)


@given(body=st.binary(max_size=64))
def test_arbitrary_bytes_are_no_message(body):
    with pytest.raises(MessageError):
        ENGINE_EVENTS.decode(body)


def test_a_message_above_the_limit_is_refused_before_it_is_read():
    channel = Channel("Small", Submit | GetLengthStats, max_bytes=16)
    announced = io.BytesIO(HEADER.pack(17) + bytes(17))
    with pytest.raises(MessageError, match="a message of 17 bytes does not fit Small: the limit is 16"):
        channel.read(announced.read)
    assert announced.tell() == HEADER.size
