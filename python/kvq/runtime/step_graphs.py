"""Steps as CUDA graphs: hundreds of launches become one call."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from kvq.errors import LibraryError
from kvq.runtime.cuda_driver import CudaDriver

logger = logging.getLogger("kvq")

#: Graphs that are kept, the latest used ones.
MAX_GRAPHS = 64
#: How often a key is tried to be recorded.
MAX_ATTEMPTS = 3


class StepGraphs:
    """The graphs of one model.

    A step's key says everything that a launch depends on: which function, how many rows, where tensors lie
    and how long they are. The first step of a key runs as it is: it takes the memory for what is in between
    from TVM's pool, where the capture, which computes nothing, then finds the same. If it does not, for it
    may not allocate, the step runs as it is once more, and the next one is recorded. All steps of the model
    share one stream, so that memory of the pool serves one of them at a time. TVM gives the pool's memory
    back to the device when that has none left: :meth:`make_room` forgets the graphs before that can happen.

    Parameters
    ----------
    driver : CudaDriver
        Its stream is the one that steps run on.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._graphs: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._refused: Counter[Hashable] = Counter()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Run a step; returns what ``work`` returned when it was recorded: the tensors of its results."""
        found = self._graphs.get(key)
        if found is None:
            if key not in self._seen or self._refused[key] == MAX_ATTEMPTS:
                self._seen.add(key)
                return work()
            try:
                found = self._record(key, work)
            except LibraryError as error:
                self._refused[key] += 1
                if self._refused[key] == MAX_ATTEMPTS:
                    logger.warning(
                        "a step was not recorded as a CUDA graph, so its kind runs unrecorded: %s", error
                    )
                return work()
        self._graphs.move_to_end(key)
        executable, results = found
        self._driver.launch(executable)
        return results

    def make_room(self, num_bytes: int) -> bool:
        """Forget all graphs unless the device has ``num_bytes``, which a step may take; whether it did."""
        if not self._graphs or self._driver.memory()[0] >= num_bytes:
            return False
        self._driver.synchronize()
        while self._graphs:
            self._driver.free_graph(self._graphs.popitem()[1][0])
        self._seen.clear()
        return True

    def _record(self, key: Hashable, work: Callable[[], Any]) -> tuple[Any, Any]:
        results: list[Any] = []
        executable = self._driver.capture(lambda: results.append(work()))
        self._graphs[key] = executable, results[0]
        if len(self._graphs) > MAX_GRAPHS:
            _, (oldest, _) = self._graphs.popitem(last=False)
            self._driver.synchronize()
            self._driver.free_graph(oldest)
        return self._graphs[key]
