"""Work in pieces: each is done once, by one thread of torch, and the caller has its threads again afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from portable_coreml.run.pieces import all_threads, in_pieces, one_thread


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads that torch has."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_each_piece_is_done_once_by_one_thread_of_torch(threads: int) -> None:
    done = list[tuple[int, int, int]]()
    in_pieces(lambda first, last: done.append((first, last, torch.get_num_threads())), 10, 3)
    assert sorted(done) == [(0, 3, 1), (3, 6, 1), (6, 9, 1), (9, 10, 1)]
    assert torch.get_num_threads() == threads


def test_as_many_threads_work_as_torch_has(threads: int) -> None:
    """Each waits until all are there."""
    there, workers = threading.Barrier(threads, timeout=60), set[int]()

    def work(first: int, last: int) -> None:
        there.wait()
        workers.add(threading.get_ident())

    with one_thread():
        in_pieces(work, threads, 1)
    assert len(workers) == threads


def test_a_failing_piece_ends_the_work_with_its_error(threads: int) -> None:
    def work(first: int, last: int) -> None:
        raise ValueError(f"piece {first}")

    with pytest.raises(ValueError, match="piece"):
        in_pieces(work, 4, 1)
    assert torch.get_num_threads() == threads


def test_threads_that_begin_later_have_all_of_torchs_threads(threads: int) -> None:
    """Torch takes what any thread was told last for the threads that begin after it."""
    in_pieces(lambda first, last: time.sleep(0), 8, 1)
    later = list[int]()
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_work_in_integers_gets_all_threads_back(threads: int) -> None:
    with one_thread():
        with all_threads():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 1
    with all_threads():
        assert torch.get_num_threads() == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_works_though_its_parents_threads_are_gone(threads: int) -> None:
    in_pieces(lambda first, last: None, 8, 1)
    child = os.fork()
    if not child:
        done = list[int]()
        in_pieces(lambda first, last: done.append(first), 8, 1)
        os._exit(0 if sorted(done) == list(range(8)) else 1)
    assert os.waitpid(child, 0)[1] == 0
