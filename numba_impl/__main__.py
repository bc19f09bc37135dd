"""``python -m numba_impl COMMAND`` checks an installation, or compiles kernels ahead."""

import argparse
import sys

BENCHMARK = 128, 64, 128, 128


def main(arguments=None) -> int:
    """Run the command that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m numba_impl", description="Fused ConvTranspose2d layer on Numba kernels.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    about = "say what is installed and what does not fit together, and check every backend; exits 1 if anything is wrong"
    commands.add_parser("doctor", help=about, description=about).set_defaults(run=_doctor)
    about = "compile the kernels that calls need ahead, for the cache on disk; exits 1 where they cannot be kept"
    warm = commands.add_parser("warm", help=about, description=about)
    add = warm.add_argument
    add("shapes", nargs="*", type=shape, default=[BENCHMARK], metavar="N,C,H,W", help="of x; default: the benchmark shape")
    add("--out-channels", type=int, default=64, help="default: %(default)s")
    for name, default in (("kernel", 3), ("stride", 2), ("padding", 1), ("output-padding", 1)):
        add(f"--{name}", type=sides, default=default, metavar="K[,K]", help="default: %(default)s")
    add("--precision", choices=("fp32", "tf32", "both"), default="both", help="default: %(default)s")
    add("--train", action="store_true", help="the backward's kernels too")
    warm.set_defaults(run=_warm)
    args = parser.parse_args(arguments)
    return args.run(args)


def shape(text) -> tuple[int, ...]:
    """Read a shape, with commas between its sizes."""
    batch, channels, height, width = map(int, text.split(","))
    return batch, channels, height, width


def sides(text) -> tuple[int, int]:
    """Read an int for both axes, or two with a comma between them."""
    rows, cols = map(int, text.split(",") if "," in text else (text, text))
    return rows, cols


def _doctor(args) -> int:
    from numba_impl import doctor

    return doctor.main()


def _warm(args) -> int:
    from numba_impl import warm

    return warm.main(args)


if __name__ == "__main__":
    sys.exit(main())
