"""Batches on their way to the device."""

import pytest
import torch

from lambdanets.train.prefetch import on_device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_batch_goes_to_no_other_while_it_is_read():
    batches = [torch.full((2**20,), float(number)).pin_memory() for number in range(8)]
    sums = []
    for batch in on_device(iter(batches), torch.device("cuda")):
        torch.cuda._sleep(20_000_000)  # the host is ahead of the device, and gives the batch away before it is read
        sums.append(batch.mean())
        del batch
    assert torch.stack(sums).tolist() == list(range(8))


def test_batches_keep_their_order_and_shape():
    batches = [{"x": (torch.tensor([number]), [number])} for number in range(3)]
    assert list(on_device(iter(batches), torch.device("cpu"))) == batches
