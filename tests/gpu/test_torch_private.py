"""torch's private names for streams and memory of a GPU tell what its public ones tell."""

import torch

from prefixkit import torch_private as private


def test_public_names_tell_of_a_device_what_private_ones_tell():
    device = torch.cuda.current_device()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        assert private.raw_stream(device) == private.public_stream(device) == stream.cuda_stream
    assert private.current_device() == device
    found, x = [], torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        found += [private.stream_captures(), private.public_capturing()]
    assert found == [True, True]
    assert not private.stream_captures() and not private.public_capturing()
    over = torch.empty(0, device="cuda").set_(private.public_storage(x.data_ptr(), x.device, 4), 0, (1,))
    assert over.data_ptr() == x.data_ptr()
