"""Sample calls of every op on a GPU: replays on changed data, streams, and calls that do not wait for the device."""

from __future__ import annotations

import pytest
import torch
from no_sync import no_waits

from nwor_ops import ops
from nwor_ops.ops import registry
from nwor_ops.testing import oracle, samples
from nwor_ops.testing.against_oracle import compare
from nwor_ops.testing.layouts import bytes_of, storages, twin

OPS = tuple(registry.OPS)


def load(buffers, arguments) -> None:
    """Copy the bytes of other arguments into buffers that a graph reads."""
    for buffer, source in zip(storages(buffers).values(), storages(arguments).values(), strict=True):
        bytes_of(buffer).copy_(bytes_of(source))


def capture(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@pytest.mark.parametrize("op", OPS)
def test_replay_of_changed_data(device, op):
    """A graph is captured once. Each replay has other requests, indices, slots and numbers, and poisoned outputs."""
    versions = [samples.recorded(op, 6, data_seed) for data_seed in range(6)]
    for first, *others in zip(*versions, strict=True):
        buffers = twin(first.arguments, device)
        graph, result = capture(lambda buffers=buffers: getattr(ops, op)(*buffers))
        for call in others:
            load(buffers, call.arguments)
            graph.replay()
            theirs = twin(call.arguments)
            compare(op, result, getattr(oracle, op)(*theirs), buffers, theirs, call.tolerances)


@pytest.mark.parametrize("op", OPS)
def test_current_stream(device, op):
    """The arguments are valid only when the stream gets to the call."""
    for call in samples.recorded(op, 2):
        buffers, source, stream = twin(call.arguments, device), twin(call.arguments, device), torch.cuda.Stream()
        for storage in storages(buffers).values():
            bytes_of(storage).zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            load(buffers, source)
            result = getattr(ops, op)(*buffers)
        stream.synchronize()
        theirs = twin(call.arguments)
        compare(op, result, getattr(oracle, op)(*theirs), buffers, theirs, call.tolerances)


@pytest.mark.parametrize("op", OPS)
def test_no_call_waits(device, op):
    calls = samples.calls(op, 4, device)
    getattr(ops, op)(*samples.calls(op, 1, device)[0])
    with no_waits():
        for arguments in calls:
            getattr(ops, op)(*arguments)
