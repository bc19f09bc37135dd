"""The command ``python -m numba_impl.fuzz``."""

import argparse
import math
import random
import sys

import torch

from numba_impl import dispatch
from numba_impl.fuzz.bounds import Wrong
from numba_impl.fuzz.call import Lost, run_case
from numba_impl.fuzz.case import parse_case
from numba_impl.fuzz.draw import SERVING
from numba_impl.fuzz.search import Search, report


def main(argv=None) -> int:
    """The exit status: 0 if nothing was wrong, 1 if a case was."""
    args = parse(argv)
    if args.case is not None:
        return rerun(args.case)
    search = Search(args.minutes, args.seed, args.device, args.backend, args.cases)
    search.run()
    if search.failure is not None:
        report(*search.failure)
    search.progress.finish(f"{search.progress.summary()}; seed {args.seed}, {args.device}")
    return int(search.failure is not None)


def rerun(case) -> int:
    try:
        name = run_case(case)
    except (Wrong, Lost) as error:
        report(case, error)
        return 1
    print(f"right: {case}, {name}")
    return 0


def parse(argv):
    """The checked arguments; wrong ones end the program with a message."""
    parser = argparse.ArgumentParser("python -m numba_impl.fuzz", description="Compare drawn calls of the layer with float64.")
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="how long; default: %(default)s")
    add("--cases", type=int, help="how many at most; default: as many as there is time for")
    add("--seed", type=int, help="of the calls; default: drawn, and printed")
    add("--device", choices=tuple(SERVING), default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--backend", choices=tuple(dispatch.BACKENDS), help="forced in every call; default: some, and dispatch's own choice")
    add("--case", metavar="CASE", help="run this alone, as a failure prints it")
    args = parser.parse_args(argv)
    if args.case is not None:
        try:
            args.case = parse_case(args.case)
        except (ValueError, TypeError) as error:
            parser.error(f"--case: {error}")
    device = args.device if args.case is None else args.case.device
    if device not in SERVING:
        parser.error(f"--case: device must be one of {tuple(SERVING)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if args.case is not None:
        return args
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if args.cases is not None and args.cases < 1:
        parser.error(f"--cases must be positive, got {args.cases}")
    if args.backend not in (None, *SERVING[device]):
        parser.error(f"--backend {args.backend} serves no call on {device}, only {', '.join(SERVING[device])} do")
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        parser.error("hypothesis is missing, of the extra test: pip install '.[test]'")
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    return args


if __name__ == "__main__":
    sys.exit(main())
