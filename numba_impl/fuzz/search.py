"""The search for a wrong case: runs drawn ones, counts, shrinks what fails, and prints the line that reproduces it."""

import collections
import math
import random
import shlex
import sys
import time

from numba_impl.fuzz.bounds import Wrong
from numba_impl.fuzz.call import Lost, run_case
from numba_impl.fuzz.draw import KINDS, Draw, draw_case, draw_layer

SHRINKING = 60.0  # seconds
# On CUDA a geometry compiles a kernel of some 3 s for the forward, the backward, each precision and each alignment: all cases
# of a round share a few geometries, and there is one more after each round in which compiling has died down.
ROUND, BUSY = 10.0, 100  # seconds; cases
WRONG = "wrong"  # counted beside the backends


class Over(BaseException):
    """The time for a round is over; hypothesis lets it through."""


class Progress:
    """Counts, shown in one line that is written over on a terminal."""

    def __init__(self, stream):
        self.stream, self.start, self.shown = stream, time.monotonic(), 0.0
        self.served, self.kinds = collections.Counter(), collections.Counter()

    def line(self):
        """Cases run, failures, and who served how many."""
        cases, failures, seconds = self.served.total(), self.served[WRONG], time.monotonic() - self.start
        return f"{cases} cases, failures: {failures}, {cases / max(seconds, 1e-9):.1f}/s; {listed(self.served)}"

    def summary(self):
        """The line, and how many cases were of each kind."""
        return f"{self.line()}; {listed(self.kinds)}"

    def count(self, name, case):
        self.served[name] += 1
        self.kinds.update(case.kinds)
        terminal, now = self.stream.isatty(), time.monotonic()
        if now - self.shown >= 1 and now - self.start >= 1:
            self.shown = now
            self.stream.write(f"\r{self.line()}\033[K" if terminal else f"{self.line()}\n")
            self.stream.flush()

    def finish(self, text):
        self.stream.write(("\r\033[K" if self.stream.isatty() else "") + text + "\n")
        self.stream.flush()


def listed(counts):
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


class Search:
    """Runs drawn cases until ``minutes`` are over, or one is wrong: that is then shrunk, and ``failure`` is (case, error)."""

    def __init__(self, minutes, seed, device, backend, most_cases=None):
        self.end, self.seed, self.device, self.backend = time.monotonic() + 60 * minutes, seed, device, backend
        self.most_cases = most_cases or math.inf
        self.progress = Progress(sys.stdout)
        self.failed, self.failure, self.shrunk = {}, None, math.inf  # until when to shrink

    def over(self):
        return time.monotonic() >= self.end or self.progress.served.total() >= self.most_cases

    def run(self):
        layers, number = ([], 0) if self.device == "cuda" else (None, 0)
        before = -BUSY
        while not self.over() and self.failure is None:
            if layers is not None and self.progress.served.total() - before >= BUSY:
                kind = "hopper" if self.backend == "hopper" else KINDS[(len(layers) + 1) % len(KINDS)]
                source = random.Random(f"{self.seed} {len(layers)}")
                layers.append((kind, draw_layer(Draw(source.randint), kind, self.device)))
            before = self.progress.served.total()
            self._round(layers, self.seed * 2**20 + number)
            number += 1

    def _round(self, layers, seed):
        import hypothesis
        from hypothesis import strategies

        until = time.monotonic() + ROUND

        @hypothesis.seed(seed)
        @hypothesis.settings(
            **dict(max_examples=1000, deadline=None, database=None, report_multiple_bugs=False),
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategies.data())
        def run_drawn(data):
            integers = lambda least, most: data.draw(strategies.integers(least, most))  # noqa: E731
            case = draw_case(Draw(integers), self.device, self.backend, layers)  # first, as hypothesis wants all data the same
            if not self.failed and (self.over() or time.monotonic() >= until):
                raise Over
            self._one(case)

        try:
            run_drawn()
        except Over:
            pass
        except Lost as error:
            if not self.failed:
                self.progress.count(WRONG, self.current)
            self.failure = self.current, str(error)
        except Exception as error:
            if not self.failed:
                raise
            case, message = self.last
            again = "" if isinstance(error, Wrong) else " (at one run, and not at another)"
            self.failure = case, message + again

    def _one(self, case):
        self.current = case
        if time.monotonic() > self.shrunk:  # nothing new any more; hypothesis runs the simplest again
            if case not in self.failed:
                return
            message = self.failed[case]
        else:
            try:
                name = run_case(case)
                if not self.failed:
                    self.progress.count(name, case)
                return
            except Wrong as error:
                message = str(error)
        if not self.failed:
            self.progress.count(WRONG, case)
            self.shrunk = time.monotonic() + SHRINKING
        self.failed[case], self.last = message, (case, message)
        raise Wrong(message)


def report(case, error):
    """Says what is wrong, and prints the line that reproduces it."""
    print(f"numba_impl.fuzz: {error}", file=sys.stderr)
    print(f"python -m numba_impl.fuzz --case {shlex.quote(str(case))}", flush=True)
