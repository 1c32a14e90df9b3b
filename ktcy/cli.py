"""The command line: ``python -m ktcy`` and the console script ``ktcy``. The only module that prints."""

import argparse
import json
import sys

from ._version import __version__


def doctor(args):
    from .doctor import doctor

    report = doctor()
    print(json.dumps(report, indent=2) if args.json else report)
    return 0 if report["ok"] else 1


def parser():
    root = argparse.ArgumentParser(prog="ktcy", description="Mixture-of-Experts layers on the CPU.")
    root.add_argument("--version", action="version", version=f"ktcy {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    p = commands.add_parser("doctor", help="what ktcy uses on this machine, and what stands in the way of better")
    p.add_argument("--json", action="store_true", help="the report as JSON")
    p.set_defaults(run=doctor)

    return root


def main(argv=None):
    """Runs one command; returns the exit code. Errors a user can cause are one line on stderr, not a traceback."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"ktcy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
