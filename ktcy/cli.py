"""The command line: ``python -m ktcy`` and the console script ``ktcy``. The only module that prints."""

import argparse
import json
import sys

from ._version import __version__


def doctor(args):
    from .doctor import doctor

    report = doctor()
    print(json.dumps(report, indent=2) if args.json else report)
    return 1 if report["same_bits"]["differ"] else 0


def convert(args):
    from .conversion import convert, verify_folder

    if args.out is None:
        if not args.verify:
            raise ValueError("convert needs MODEL and OUT; only --verify takes one folder, a converted one")
        manifest = verify_folder(args.model, args.threads)
        print(f"{args.model}: {len(manifest['layers'])} layers verified")
        return 0
    try:
        manifest = convert(args.model, args.out, args.format, args.layers, args.threads, args.verify)
    except KeyboardInterrupt:
        print("ktcy: interrupted; run the same command again and it goes on from the last whole layer", file=sys.stderr)
        return 130
    done = manifest["layers"].values()
    worst = max(entry["error"]["rms"] for entry in done)
    print(f"{args.out}: {len(done)} layers in {manifest['format']}, weights changed by at most {worst:.2%} (RMS)")
    return 0


def layers(text):
    """"3:9", "3:", ":9" as a slice; "3" as one layer."""
    first, colon, end = text.partition(":")
    if not colon:
        return [int(first)]
    return slice(int(first) if first else None, int(end) if end else None)


def parser():
    root = argparse.ArgumentParser(prog="ktcy", description="Mixture-of-Experts layers on the CPU.")
    root.add_argument("--version", action="version", version=f"ktcy {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    p = commands.add_parser("doctor", help="what ktcy uses on this machine, and what stands in the way of better")
    p.add_argument("--json", action="store_true", help="the report as JSON")
    p.set_defaults(run=doctor)

    p = commands.add_parser("convert", help="pack a checkpoint's experts for the CPU, once; running it again resumes")
    p.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint")
    p.add_argument("out", metavar="OUT", nargs="?", help="folder for the result; without it, --verify checks MODEL")
    p.add_argument("--format", default="int8", help="weight format (default: int8)")
    p.add_argument("--layers", type=layers, help="which layers, as in 3:9 (3 to 8), 3: or 3; default: all with experts")
    p.add_argument("--threads", type=int, help="default: one for each core this process may use")
    p.add_argument("--verify", action="store_true", help="read the result again and compare checksums")
    p.set_defaults(run=convert)

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
