"""Messages between the front end and the engine survive the way, whatever pieces they come in; none is a pickle."""

import json
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from exeplan.runner.ipc.frames import Event, Logprob, frame, read_frame

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(messages=st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=4))
def test_frames_come_back_in_order_and_end_in_none(messages):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(frame(message) for message in messages))
        ours.shutdown(socket.SHUT_WR)
        assert [read_frame(theirs) for _ in messages] == messages
        assert read_frame(theirs) is None


def test_a_frame_larger_than_any_buffer_comes_whole():
    ours, theirs = socket.socketpair()
    message = {"prompt_token_ids": list(range(500_000))}
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(frame(message),))
        sender.start()
        assert read_frame(theirs) == message
        sender.join()


def test_an_event_survives_json():
    event = Event(
        request_id="7-0",
        token_ids=[5],
        text="\N{SNOWMAN}",
        finish_reason=None,
        first=True,
        arrival=1.0,
        start=1.5,
        time=2.0,
        num_prompt_tokens=3,
        logprobs=[Logprob(5, -0.5, [[5, -0.5], [6, -1.0]])],
    )
    assert Event.of(json.loads(json.dumps(event))) == event
