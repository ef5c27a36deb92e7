"""Every message round-trips; another field or type is refused; the receiving end handles every kind."""

import ast
import inspect
import textwrap
from dataclasses import fields
from importlib.util import find_spec
from typing import get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Packing
from exeplan.profiler.multi_device import links
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.distributed.multiprocess_executor import MultiprocessExecutor
from exeplan.runner.distributed.worker import Worker
from exeplan.runner.distributed.worker_group import WorkerGroup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.process import _EngineLoop
from exeplan.runner.ipc import fork_server, front_end_messages, messages
from exeplan.runner.ipc.frames import Channel, MessageError, frame
from exeplan.runner.replan import advisor
from exeplan.runner.replan.advisor import Advisor
from exeplan.runner.replan.devices import DeviceFollower
from exeplan.runner.replan.replanner import Replanner
from exeplan.runner.server.front_ends import placer_process, process
from exeplan.runner.server.front_ends.joined_engine import JoinedEngine
from exeplan.runner.server.front_ends.owner import _FrontEnd
from exeplan.runner.server.network import readers
from exeplan.runner.server.network.reader_process import Reader
from exeplan.runner.server.network.readers import Readers
from exeplan.runner.server.service import Service

DECLARED = [*vars(messages).values(), *vars(front_end_messages).values()]
CHANNELS = [value for value in DECLARED if isinstance(value, Channel)]
MESSAGES = [(channel, kind) for channel in CHANNELS for kind in channel.messages]
IDS = [kind.__name__ for _, kind in MESSAGES]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
HANDLERS = {
    "EngineCommand": [_EngineLoop._take],
    "EngineEvent": [EngineClient._take],
    "ForkCommand": [fork_server._Server._take],
    "ForkReply": [fork_server.ForkChannel.fork, fork_server.ForkChannel.end],
    "WorkerCommand": [Worker.take],
    "WorkerEvent": [WorkerGroup._await_ready, MultiprocessExecutor._take, MultiprocessExecutor.save,
                    MultiprocessExecutor.restore],
    "AdvisorRequest": [Advisor.take, advisor.plan_left],
    "AdvisorReply": [Replanner._look, Replanner.frontier, Replanner._start_advisor, DeviceFollower._find],
    "RankReport": [links._answers],
    "ReaderCommand": [Reader.take],
    "ReaderAnswer": [Readers._read, readers._Reader._start, Service.read_generation, Service.tokenize,
                     Service.detokenize],
    "OwnerMessage": [process.main, JoinedEngine._take],
    "FrontEndMessage": [_FrontEnd._take],
    "PlacerReply": [placer_process.PlacerProcess._receive],
}  # fmt: skip
if find_spec("ray"):
    from exeplan.runner.server.front_ends import placing

    HANDLERS["PlacerCommand"] = [placing.main, placing._read]


def values(declared: msgspec.inspect.Type) -> st.SearchStrategy:
    """Any value of a declared type."""
    match declared:
        case msgspec.inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text(max_size=8)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=8)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.AnyType():
            return json_values
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case msgspec.inspect.TupleType(item_types=types):
            return st.tuples(*map(values, types))
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case msgspec.inspect.CollectionType(item_type=item):
            return st.lists(values(item), max_size=2)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case (
            msgspec.inspect.StructType(cls=cls)
            | msgspec.inspect.DataclassType(cls=cls)
            | msgspec.inspect.NamedTupleType(cls=cls)
        ):
            return st.builds(cls, **{one.name: values(one.type) for one in declared.fields})
    raise AssertionError(f"no values for {declared}")


def parts(declared: msgspec.inspect.Type) -> set[type]:
    """All Structs within a declared type."""
    found = {declared.cls} if isinstance(declared, msgspec.inspect.StructType) else set()
    inner = [one.type for one in getattr(declared, "fields", ())]
    for name in ("types", "item_types"):
        inner += getattr(declared, name, ())
    inner += [getattr(declared, name) for name in ("item_type", "key_type", "value_type") if hasattr(declared, name)]
    return found.union(*map(parts, inner))


def plain(message: msgspec.Struct) -> dict:
    return msgspec.msgpack.decode(frame(message)[4:])


def body(values: object) -> bytes:
    return msgspec.msgpack.encode(values)


def test_every_struct_is_part_of_a_channel():
    declared = {kind for kind in DECLARED if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    reached = set().union(*(parts(msgspec.inspect.type_info(kind)) for _, kind in MESSAGES))
    assert declared - reached == {msgspec.Struct, messages.Message, messages.Part, messages.Record}
    assert len(IDS) == len(set(IDS))


@pytest.mark.parametrize(("channel", "kind"), MESSAGES, ids=IDS)
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(channel, kind, data):
    message = data.draw(values(msgspec.inspect.type_info(kind)))
    assert channel.decode(frame(message)[4:]) == message


@pytest.mark.parametrize(("channel", "kind"), MESSAGES, ids=IDS)
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_another_field_or_type_is_refused(channel, kind, data):
    message = plain(data.draw(values(msgspec.inspect.type_info(kind))))
    with pytest.raises(MessageError, match="unknown field `surprise`"):
        channel.decode(body({**message, "surprise": 1}))
    for name in kind.__struct_fields__:
        without = {key: value for key, value in message.items() if key != name}
        with pytest.raises(MessageError, match=rf"\$\.{name}|{name}"):
            channel.decode(body({**without, name: msgspec.msgpack.Ext(5, b"")}))
        if name not in optional(kind):
            with pytest.raises(MessageError, match=f"missing required field `{name}`"):
                channel.decode(body(without))


def optional(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    count = len(kind.__struct_defaults__)
    return kind.__struct_fields__[-count:] if count else ()


def test_a_record_has_no_more_values_than_fields():
    good = plain(messages.KVSaved(stored=[1]))
    assert messages.WORKER_EVENTS.decode(body(good)) == messages.KVSaved(stored=[1])
    ready = plain(messages.WorkerReady(capacity=messages.KVCapacity(1, 2)))
    with pytest.raises(MessageError, match=r"at most length 2, got 3 - at `\$\.capacity`"):
        messages.WORKER_EVENTS.decode(body({**ready, "capacity": [1, 2, 3]}))


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_the_receiving_end_handles_every_kind(channel):
    """A kind that a handler does not name would be dropped, or taken for another one."""
    if channel.name == "PlacerCommand" and find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'exeplan[ray]'")
    named = {name for handler in HANDLERS[channel.name] for name in names_in(handler)}
    assert {kind.__name__ for kind in channel.messages} <= named


def names_in(function) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_sampling_has_the_fields_of_sampling_params():
    """The message cannot import the parameters, which are to its right among the rooms."""
    found, wanted = (get_type_hints(one) for one in (messages.Sampling, SamplingParams))
    assert found == {one.name: wanted[one.name] for one in fields(SamplingParams)}


def test_a_packing_keeps_its_type():
    hints = get_type_hints(messages.RunBatch)
    assert hints["packing"] == Packing | None
