"""``python -m numba_impl COMMAND``: what can be asked of the package at a terminal."""

import argparse
import sys


def main(arguments=None) -> int:
    """Run the command that the arguments name; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m numba_impl", description="Fused ConvTranspose2d layer on Numba kernels.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    about = "say what is installed and what does not fit together, and check every backend; exits 1 if anything is wrong"
    commands.add_parser("doctor", help=about, description=about).set_defaults(run=_doctor)
    args = parser.parse_args(arguments)
    return args.run(args)


def _doctor(args) -> int:
    from numba_impl.doctor import report

    return report.main()


if __name__ == "__main__":
    sys.exit(main())
