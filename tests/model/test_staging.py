"""A step's numbers reach the device in one copy, and nobody touches memory that is the device's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.model.staging import HostStaging, QueuedStaging, Staging
from tests.simulated_device import RaceError, SimulatedQueue

ARRAYS = [
    np.arange(5),
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.zeros(0, dtype=np.int64),
    np.array([0.5, -1.0], dtype=np.float32),
    np.array([[True, False, True]]),
    np.arange(20, dtype=np.int16).reshape(4, 5)[:, ::2],
]


@pytest.fixture
def queue() -> SimulatedQueue:
    return SimulatedQueue()


@pytest.mark.parametrize("on_host", [True, False])
def test_arrays_arrive_as_they_are(on_host: bool, queue: SimulatedQueue) -> None:
    staging: Staging = HostStaging() if on_host else QueuedStaging(queue)
    with staging.step():
        tensors = staging.upload(*ARRAYS)
        download = staging.download(tensors)
    for tensor, back, array in zip(tensors, download.wait(), ARRAYS, strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
        assert np.array_equal(back.numpy(), array)


def test_one_copy_takes_all_of_them(queue: SimulatedQueue) -> None:
    staging = QueuedStaging(queue)
    with staging.step():
        staging.upload(*ARRAYS)
    assert queue.num_copies == 1


def test_part_of_a_tensor_can_be_replaced(queue: SimulatedQueue) -> None:
    for staging in (HostStaging(), QueuedStaging(queue)):
        target = torch.zeros(3, 5, dtype=torch.int64)
        with staging.step():
            staging.upload_into(target[1:, :2], np.array([[1, 2], [3, 4]]))
        assert target.tolist() == [[0] * 5, [1, 2, 0, 0, 0], [3, 4, 0, 0, 0]]


def test_a_download_holds_what_the_device_had_when_it_was_asked_for(queue: SimulatedQueue) -> None:
    staging = QueuedStaging(queue)
    tensor = torch.tensor([1, 2, 3])
    with staging.step():
        download = staging.download([tensor])
        tensor.zero_()
    assert download.tensors[0].tolist() != [1, 2, 3], "it cannot be there yet"
    assert download.wait()[0].tolist() == [1, 2, 3]


def test_two_steps_may_be_under_way_and_memory_grows_to_the_largest(queue: SimulatedQueue) -> None:
    staging = QueuedStaging(queue)
    under_way = []
    for number in range(50):
        with staging.step():
            sizes = [10, 1 << (number % 20), 1 << 15]
            under_way.append((number, staging.download(staging.upload(*(np.full(size, number) for size in sizes)))))
        if len(under_way) == 2:
            expected, download = under_way.pop(0)
            assert all((tensor == expected).all() for tensor in download.wait())
    assert sum(len(buffer.memory) for buffer in staging._buffers) < 8 * (1 << 19) * 8


def test_the_simulated_device_notices_a_buffer_that_is_written_too_soon(queue: SimulatedQueue) -> None:
    buffer = queue.host_buffer(8)
    queue.copy(torch.zeros(8, dtype=torch.uint8), buffer)
    buffer.zero_()
    with pytest.raises(RaceError):
        queue.mark().wait()


def test_a_third_step_waits_for_the_first(queue: SimulatedQueue) -> None:
    staging = QueuedStaging(queue)
    for number in range(3):
        with staging.step():
            staging.upload(np.full(100, number))
        assert queue.num_done == max(0, number - 1)
