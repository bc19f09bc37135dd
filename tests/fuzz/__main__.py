"""The soak: runs drawn calls, counts, shrinks what fails, and prints the line that repeats it."""

import argparse
import math
import random
import shlex
import sys
import time
from collections import Counter

import hypothesis
import torch

from numba_impl.backends import BACKENDS
from numba_impl.oracle import Wrong
from tests.fuzz import strategies
from tests.fuzz.call import Call
from tests.fuzz.check import REACH, Lost, check

ROUND = 50  # calls
# On CUDA a layer compiles a kernel of some 3 s for the forward, the backward, each precision and each alignment: all calls of a
# round share a few layers, and there is one more after each round that took no longer than this.
BUSY = 10.0  # seconds

hypothesis.settings.register_profile(
    "soak",
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)


class Soak:
    """Rounds of drawn calls, counted by who served and by kind, until one is wrong: ``failure`` is its (call, error), shrunk."""

    def __init__(self, seed, device, backend=None):
        self.seed, self.device, self.backend = seed, device, backend
        self.start, self.rounds, self.pool = time.monotonic(), 0, None if device == "cpu" else []
        self.served, self.kinds, self.failure = Counter(), Counter(), None

    def run(self, minutes, most=math.inf):
        """Until the time is over, or ``most`` calls have run."""
        quick = True
        while self.failure is None and time.monotonic() < self.start + 60 * minutes and self.served.total() < most:
            if self.pool is not None and quick:
                kind = "hopper" if self.backend == "hopper" else strategies.KINDS[(len(self.pool) + 1) % len(strategies.KINDS)]
                self.draw(strategies.layers(kind, self.device), 10, drawn := [])
                self.pool.append(drawn[-1])
            start, calls = time.monotonic(), strategies.calls(self.device, self.backend, self.pool)
            self.draw(calls, min(ROUND, most - self.served.total()), [], self.one)
            quick = time.monotonic() < start + BUSY
            print(self, flush=True)

    def draw(self, strategy, count, drawn, use=lambda value: None):
        """So many values of a strategy into ``drawn``, each given to ``use``; of one for which that raises, simpler ones."""
        self.rounds += 1

        @hypothesis.seed(self.seed * 2**20 + self.rounds)
        @hypothesis.settings(hypothesis.settings.get_profile("soak"), max_examples=count)
        @hypothesis.given(strategy)
        def take(value):
            drawn.append(value)
            use(value)

        try:
            take()
        except (Exception, Lost):  # hypothesis' own, if the call was right the second time
            if self.failure is None:
                raise

    def one(self, call):
        """Check a call and count it, unless it shrinks one that was wrong."""
        counts = self.failure is None
        try:
            name = check(call)
        except (Wrong, Lost) as error:
            name, self.failure = "wrong", (call, error)
            raise
        finally:
            if counts:
                self.served[name] += 1
                self.kinds.update(call.kinds)

    def __str__(self):
        cases, seconds = self.served.total(), time.monotonic() - self.start
        counts = "; ".join(", ".join(f"{name} {n}" for name, n in found.most_common()) for found in (self.served, self.kinds))
        return f"{cases} cases, failures: {self.served['wrong']}, {cases / max(seconds, 1e-9):.1f}/s; {counts}"


def main(argv=None) -> int:
    """The exit status: 0 if nothing was wrong, 1 if a call was."""
    args = parse(argv)
    if args.case is not None:
        try:
            print(f"right: {args.case}, {check(args.case)}")
        except (Wrong, Lost) as error:
            return report(args.case, error)
        return 0
    soak = Soak(args.seed, args.device, args.backend)
    soak.run(args.minutes, args.cases)
    status = report(*soak.failure) if soak.failure else 0
    print(f"{soak}; seed {args.seed}, {args.device}")
    return status


def report(call, error) -> int:
    """Says what is wrong, and prints the line that repeats it; the exit status."""
    print(f"tests.fuzz: {error}", file=sys.stderr)
    print(f"python -m tests.fuzz --case {shlex.quote(str(call))}", flush=True)
    return 1


def parse(argv):
    """The checked arguments; wrong ones end the program with a message."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Compare drawn calls of the layer with float64.")
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="how long; default: %(default)s")
    add("--cases", type=int, default=math.inf, help="how many at most; default: as many as there is time for")
    add("--seed", type=int, default=random.randrange(2**31), help="of the calls; default: drawn, and printed")
    add("--device", choices=tuple(REACH), default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--backend", choices=tuple(BACKENDS), help="forced in every call; default: some, and dispatch's own choice")
    add("--case", metavar="CASE", help="run this alone, as a failure prints it")
    args = parser.parse_args(argv)
    try:
        args.case = args.case if args.case is None else Call.parse(args.case)
    except (ValueError, TypeError) as error:
        parser.error(f"--case: {error}")
    device = args.case.device if args.case else args.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    for name in ("minutes", "cases"):
        if not getattr(args, name) > 0 or args.minutes == math.inf:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if args.backend not in (None, *REACH[device]):
        parser.error(f"--backend {args.backend} serves no call on {device}, only {', '.join(REACH[device])} do")
    return args


if __name__ == "__main__":
    sys.exit(main())
