"""How long a call takes: launched or replayed from a CUDA graph, with L2 cold or warm.

``triton.testing`` times cold launches (``do_bench``) and replays on end (``do_bench_cudagraph``), ``torch.utils.benchmark``
calls on a CPU. Two ways are our own, as neither library has them: replays with a flush of L2 before each, which are
``do_bench`` of a graph's replay, and launches on end (``launches_on_end``).
"""

import functools
import math
from dataclasses import dataclass

import torch

from benchmarks.results import Timing

SAMPLES = 10  # of calls on end
SAMPLE = 5  # milliseconds of them, so that the host's start and the events' resolution do not count
CACHED = 4  # times L2: a call that touches more bytes finds nothing in L2 that the call before left


@dataclass(frozen=True)
class Timer:
    """Times a function for some ``milliseconds``; ``replayed``: by replays on end, which hide the host's time."""

    device: torch.device
    milliseconds: int
    replayed: bool = False

    @property
    def method(self) -> str:
        if self.device.type == "cpu":
            return f"torch.utils.benchmark, {torch.get_num_threads()} threads"
        return "replays of a CUDA graph on end, L2 not flushed" if self.replayed else "CUDA events, L2 flushed before each call"

    def __call__(self, function) -> Timing:
        if self.device.type == "cpu":
            return launches_on_cpu(function, self.milliseconds)
        return replays_on_end(function) if self.replayed else flushed(function, self.milliseconds)

    def copy(self, target, source) -> Timing:
        """Times ``target.copy_(source)`` at its best: of a long tensor a graph takes 1.5 times as long as a launch (H200)."""
        function = functools.partial(target.copy_, source)
        timing = self(function)
        if not self.replayed or self.device.type == "cpu":
            return timing
        return min(timing, launches_on_end(function, timing), key=lambda each: each.median)

    def further(self, function, timing: Timing, size) -> dict[str, Timing]:
        """The other timings of a call that takes ``timing`` and touches ``size`` bytes."""
        if self.device.type == "cpu" or self.replayed:
            return {}
        graph = flushed_replays(function, self.milliseconds // 4)
        if self.no_warm(size):
            return {"graph": graph}
        return {"warm": launches_on_end(function, timing), "graph": graph, "graph warm": replays_on_end(function)}

    def replays(self, function) -> dict[str, Timing]:
        """The timing of replays with L2 flushed before each, as ``further`` names it; a CPU has none."""
        return {} if self.device.type == "cpu" else {"graph": flushed_replays(function, self.milliseconds)}

    def no_warm(self, size) -> str:
        """Why calls on end that touch ``size`` bytes are not timed too; empty if they are."""
        if self.device.type == "cpu" or self.replayed:
            return ""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        too_large = f"{size / 1e6:.0f} MB leave nothing in an L2 of {cache / 1e6:.0f} MB"
        return too_large if size > CACHED * cache else ""


def launches_on_cpu(function, milliseconds) -> Timing:
    """Times calls one after the other on the CPU."""
    from torch.utils import benchmark

    timer = benchmark.Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return Timing.of(1e3 * seconds for seconds in timer.blocked_autorange(min_run_time=milliseconds / 1e3).times)


def flushed(function, milliseconds) -> Timing:
    """Times single calls, each after a write of more than L2 holds, which also hides some of the host's time."""
    from triton import testing

    return Timing.of(testing.do_bench(function, warmup=milliseconds // 4, rep=milliseconds, return_mode="all"))


def flushed_replays(function, milliseconds) -> Timing:
    """Times single replays of a CUDA graph of one call, each after such a write: without the host's time."""
    return flushed(captured(function).replay, milliseconds)


def replays_on_end(function) -> Timing:
    """Times calls one after the other in a CUDA graph: the GPU's time alone, with L2 as the call before leaves it."""
    from triton import testing

    torch.cuda.synchronize()  # triton's calls are on a stream of their own, which does not wait for ours
    return Timing.of(testing.do_bench_cudagraph(function, rep=SAMPLE, return_mode="all"))


def launches_on_end(function, timing: Timing) -> Timing:
    """Times calls one after the other: the GPU's time or the host's, whichever is longer.

    ``torch.utils.benchmark`` does the same, but a sample of its takes a tenth of a second or longer, as it counts the wait for
    the GPU as an overhead to be made small: too few samples to know their spread.
    """
    calls = math.ceil(SAMPLE / timing.median)
    times = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return Timing.of(times)


def captured(function) -> torch.cuda.CUDAGraph:
    """A graph of one call."""
    function()  # what a first call alone does cannot be captured
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.stream(torch.cuda.current_stream())  # current again also after a capture that fails
    with stream, torch.cuda.graph(graph):
        function()
    return graph
