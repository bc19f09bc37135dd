"""Check the layer against float64 and time it beside its peers.

python bench.py                                      the benchmark shape on a GPU, a smaller one on a CPU
python bench.py --suite --json RUN.json              five shapes, and keep the figures
python bench.py --train                              forward and backward, instead of the forward alone
python bench.py --sweep --json RUN.json              other batches, channels and images, and what the device reaches at its best
python bench.py --models --json RUN.json             the map: layers of real models, in every precision and memory format
python bench.py --models --train                     forward and backward of some of them
python bench.py --latency                            small calls: the host's time and its parts, and the GPU's
python bench.py --load RUN.json --markdown           the tables of a kept run
python bench.py --load RUN.json --plot RUN.svg       its plot: the map, the lines of a sweep, the bars of another run
python bench.py --load RUN.json --roofline ROOF.svg  and its roofline
python bench.py --compare OLD.json                   what moved since a kept run; with --load, between two
"""

import argparse
import importlib.util
import pathlib
import secrets
import shlex
import sys
from dataclasses import replace

import torch

from benchmarks import ceilings, compare, latency, machine, models, plots, report, sweep, tables
from benchmarks.results import Run, title
from benchmarks.timer import Timer
from numba_impl import oracle
from numba_impl.arguments import PRECISIONS
from numba_impl.case import Case

BENCHMARK = models.ROWS["benchmark"]
ON_CPU = (4, 64, 64, 64)
QUICK = (2, 16, 32, 32)
OTHERS = (
    Case((16, 256, 32, 32), 128, 4, 2, 1, 0),
    Case((16, 128, 64, 64), 64, 2, 2, 0, 0),
    Case((8, 64, 128, 128), 32, 3, 2, 1, 1),
    Case((4, 48, 37, 53), 24, 5, 3, 2, 1),
)


def main():
    args, device = parse()
    try:
        run = args.load or measure(args, device)
    except oracle.Wrong as error:
        sys.exit(f"bench.py: refusing to time a wrong kernel: {error}")
    except tables.NothingToTime as error:
        sys.exit(f"bench.py: none of the backends asked for serves: {error}")
    if args.load and not args.markdown:
        print(report.header(run))
    print(report.markdown(run) if args.markdown else "\n" + report.text(run))
    if args.compare:
        print("\n" + compare.report(args.compare, run, args.markdown))
    if args.json:
        run.save(args.json)
    if args.plot:
        plots.times(run, args.plot)
    if args.roofline:
        plots.roofline(run, args.roofline)
    if run.failed:
        sys.exit("bench.py: failed: " + ", ".join(f"{row.name} in {row.precision}" for row in run.failed))


@torch.no_grad()
def measure(args, device) -> Run:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    quick, whole = (models.QUICK_MILLISECONDS, models.MILLISECONDS) if args.models else (100, 400)
    timer = Timer(device, quick if args.quick else whole, replayed=args.sweep)
    command = shlex.join(["python", "bench.py", *sys.argv[1:]])
    about = machine.machine(device), machine.versions()
    run = Run(command, args.seed, timer.method, *about, [], before=machine.state(device), sweep=args.sweep)
    print(report.header(run), flush=True)
    if args.latency:
        print("\n" + latency.report(device, args.seed, args.quick), flush=True)
    if args.sweep or args.roofline:
        run.ceilings.update(ceilings.measure(timer))
    if args.models and device.type == "cuda":
        run.ceilings["memory"] = ceilings.memory(timer)
    for table in measured(args, timer):
        run.tables.append(table)
        if args.json:
            run.save(args.json)  # after each case: a run that is cut keeps what it has
    run.after.update(machine.state(device))
    return run


def measured(args, timer):
    """The table of each row of the map, or of each case."""
    options = args.seed, not args.quick, args.train, timer
    if args.models:
        for name, case in args.rows.items():
            yield models.measure_row(name, case, list(args.columns.values()), *options)
    else:
        for case in args.cases:
            yield tables.measure(case, args.precisions, args.backends, *options)


def kept(text) -> Run:
    """The type of an option: a run in a file."""
    try:
        return Run.load(pathlib.Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def numbers(count=None):
    """The type of an option: ``count`` ints separated by commas; without ``count``, one or two."""

    def parse(text):
        values = tuple(map(int, text.split(",")))
        if len(values) not in ((count,) if count else (1, 2)):
            raise ValueError(text)
        return values if len(values) > 1 else values[0]

    parse.__name__ = f"list of {count} ints" if count else "int or pair of ints"
    return parse


def parse(argv=None):
    """(arguments, device). Wrong arguments end the program with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", type=numbers(4), metavar="N,C,H,W", help="of x; default: the benchmark shape, on a CPU a smaller one")
    add("--out-channels", type=int, default=BENCHMARK.out_channels, help="default: %(default)s")
    for name in ("kernel", "stride", "padding", "output-padding"):
        default = getattr(BENCHMARK, "kernel_size" if name == "kernel" else name.replace("-", "_"))
        add(f"--{name}", type=numbers(), default=default, metavar="K[,K]", help="default: %(default)s")
    add("--suite", action="store_true", help="the default case and four others, instead of one case")
    add("--backends", metavar="A,B", help=f"rows of ours, of {', '.join(tables.NAMES)}; default: all that serve, less reference")
    add("--precision", choices=(*PRECISIONS, "both"), default="both", help="default: both; a CPU has fp32 alone")
    add("--quick", action="store_true", help="a small shape, few repetitions, no torch.compile")
    add("--train", action="store_true", help="time the forward and the gradients of x, weight and bias")
    add("--sweep", action="store_true", help="the case and others in batch, channels and image size, by CUDA graph replays")
    add("--models", action="store_true", help="layers of real models, in the precisions and memory formats that people use")
    add("--rows", metavar="A,B", help="of --models, some rows: layers of models; default: all")
    add("--columns", metavar="A,B", help="of --models, some columns: precisions and memory formats; default: all")
    add("--latency", action="store_true", help="host time of a small call and its parts; small cases")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--seed", type=int, help="of the weights and of x; default: drawn, and printed")
    add("--json", metavar="FILE", type=pathlib.Path, help="keep the run in FILE")
    add("--load", metavar="FILE", type=kept, help="show a kept run instead of running")
    add("--compare", metavar="OLD", type=kept, help="print what moved since a kept run")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--plot", metavar="FILE", type=pathlib.Path, help="draw the times, as .svg or .png (needs the extra bench)")
    add("--roofline", metavar="FILE", type=pathlib.Path, help="draw the roofline; measures ceilings, as --sweep does (likewise)")
    args = parser.parse_args(argv)

    if (args.plot or args.roofline) and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot and --roofline need matplotlib: pip install '.[bench]'")
    for path in (args.json, args.plot, args.roofline):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{path}: no such directory")
        if path and path.is_dir():
            parser.error(f"{path} is a directory")
    if args.load and args.roofline and (args.load.is_map or not args.load.ceilings):
        parser.error("--roofline: the run has no ceilings, which --sweep and --roofline measure")
    if args.sweep and (args.suite or args.train):
        parser.error("--sweep: it is around one case and for the forward alone, neither for --suite nor for --train")
    if not args.models and (args.rows or args.columns):
        parser.error("--rows and --columns are of --models")
    if args.models and (args.suite or args.sweep or args.latency or args.roofline or args.shape):
        parser.error("--models: it has cases of its own, for none of --suite, --sweep, --latency, --roofline and --shape")
    if args.models and (args.backends or args.precision != "both"):
        parser.error("--models: its columns have precisions of their own, and dispatch chooses the backend")
    args.backends = args.backends.split(",") if args.backends else [name for name in tables.NAMES if name != "reference"]
    for name in args.backends:
        if name not in tables.NAMES:
            parser.error(f"--backends: {name!r} is none of {', '.join(tables.NAMES)}")
    try:
        device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda, got {args.device}")
    if device.type == "cpu" and args.precision == "tf32":
        parser.error("--precision tf32: a CPU has fp32 alone")
    if args.latency and args.train:
        parser.error("--latency: it is for the forward alone, not for --train")
    if args.precision == "both":
        args.precisions = PRECISIONS if device.type == "cuda" else ("fp32",)
    else:
        args.precisions = (args.precision,)
    args.seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    if args.models:
        args.rows = picked("--rows", args.rows, models.rows(args.train, args.quick), parser)
        args.columns = picked("--columns", args.columns, models.columns(args.train, device), parser)
    else:
        args.cases = cases(args, device, parser)
    return args, device


def picked(option, names, allowed, parser):
    """Those of ``allowed``, a dictionary, whose names an option's text lists, in their own order; all if it lists none."""
    names = [name.strip() for name in names.split(",")] if names else allowed
    for name in names:
        if name not in allowed:
            parser.error(f"{option}: {name!r} is none of {', '.join(allowed)}")
    return {name: value for name, value in allowed.items() if name in names}


def cases(args, device, parser):
    """The cases to measure: the one of the options, a sweep around it, or the suite."""
    if args.latency:
        return latency.CASES if device.type == "cuda" else latency.CASES[:1]
    default = QUICK if args.quick else BENCHMARK.x if device.type == "cuda" else ON_CPU
    if args.suite:
        return [replace(BENCHMARK, x=default), *OTHERS]
    settings = args.kernel, args.stride, args.padding, args.output_padding
    case = Case(args.shape or default, args.out_channels, *settings)
    try:
        sizes = (*case.x, *case.output_shape)
    except ValueError as error:
        parser.error(str(error))
    if min(sizes) < 1:
        parser.error(f"every size must be at least 1, got {title(case)} with output {case.output_shape}")
    return sweep.cases(case) if args.sweep else [case]


if __name__ == "__main__":
    main()
