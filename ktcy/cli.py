"""The command line: ``python -m ktcy`` and the console script ``ktcy``. The only module that prints."""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile

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


def inspect(args):
    from .inspection import inspect

    report = inspect(args.path)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    what = report["architecture"] or report["model"]
    print(f"{report['path']}: {report['holds']}" + (f" of {what}" if what else ""))
    print(f"experts            {report['num_experts']}, top-{report['num_experts_per_tok']}")
    print(f"hidden size        {report['hidden_size']}")
    print(f"intermediate size  {report['moe_intermediate_size']}")
    activation = ", ".join(f"{k} {v}" for k, v in report["activation"].items() if k != "gate" and v is not None)
    print(f"activation         {report['activation']['gate']} ({activation})")
    print(f"biases             {'yes' if report['has_bias'] else 'no'}")
    print(f"experts in all     {size(report['bytes'])} in {len(report['layers'])} layers")
    alike = {}
    for number, layer in report["layers"].items():
        tensors = tuple(
            (re.sub(rf"(\b(?:layers|blk)\.){number}\b", r"\1N", t["name"]), t["dtype"], str(t["shape"]), t["count"])
            for t in layer["tensors"]
        )
        alike.setdefault((layer["kind"], layer["bytes"], tensors), []).append(number)
    for (kind, total, tensors), numbers in alike.items():
        print(f"\n{kind}, {size(total)} a layer: {layer_list(numbers)}")
        widths = [max(len(str(row[column])) for row in tensors) for column in range(3)]
        for *row, count in tensors:
            text = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths))
            print(f"  {text}  x {count}" if count > 1 else f"  {text.rstrip()}")
    for run in report["runs"]:
        error = "" if run["error"] is None else f", weights changed by {run['error']:.2%} (RMS)"
        note = f", {run['note']}" if run["note"] else ""
        print(f"\n{run['kind']} runs {run['how']}{note}{error}: {layer_list(run['layers'])}")
        for command in run["commands"]:
            print(f"  {command}")
    return 0


def size(n):
    return f"{n / 2**30:.2f} GiB" if n >= 2**27 else f"{n / 2**20:.2f} MiB"


def layer_list(numbers):
    from .weights.checkpoint import _runs

    return f"layer{'s' if len(numbers) > 1 else ''} {_runs(numbers)}"


HEAD = "layer tokens        ms   GB/s   GOPS  limit            reached   error"
NOTES = """
limit    of the two the one that allows less: to read each expert touched once at the read bandwidth, to do all
         multiply-adds at the int8 peak; both measured just before and after with the same threads, the higher counts
         (more than 100 % reached: the machine was busy with other work while they were measured)
error    relative to float64 on the bf16 weights of the checkpoint, first two tokens"""


def demo(args):
    from . import demo
    from .doctor import show_config

    config = show_config()
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="ktcy-demo-"))
        os.makedirs(folder, exist_ok=True)
        if os.listdir(folder):
            raise ValueError(f"{folder} is not empty; give a new folder")
        sizes = "{num_experts} experts of {hidden_size} x {moe_intermediate_size}, top-{num_experts_per_tok}"
        print(f"{config['cpu']}; layers: {args.layers}, each of {sizes.format(**demo.SIZES)}", flush=True)
        variant = None
        for row in demo.run(folder, layers=args.layers, threads=args.threads):
            if row["variant"] != variant:
                variant = row["variant"]
                why = config["reason"] if variant == config["variant"] else "for comparison"
                print(f"\n{variant} ({why}), {row['threads']} threads: {limit(row, 'read')}, {limit(row, 'int8')}")
                print(HEAD)
            print(
                f"{row['layer']:5} {row['tokens']:6} {row['seconds'] * 1e3:9.2f} {row['bandwidth'] / 1e9:6.1f} "
                f"{row['rate'] / 1e9:6.0f}  {limit(row, row['bound']):15} {row['fraction']:8.0%} {row['error']:7.2%}",
                flush=True,
            )
    if variant == config["variant"]:
        print(f"\nOne table, for {variant}: {config['reason']}.")
    print(NOTES)
    return 0


def limit(row, which):
    if which == "read":
        return f"read {row['read_bandwidth'] / 1e9:.1f} GB/s"
    return f"int8 {row['peak_int8'] / 1e9:.0f} GOPS"


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

    p = commands.add_parser("inspect", help="what weights hold, and whether and how ktcy runs them")
    p.add_argument("path", metavar="PATH", help="converted folder, folder of a Hugging Face checkpoint, or GGUF file")
    p.add_argument("--json", action="store_true", help="the report as JSON")
    p.set_defaults(run=inspect)

    p = commands.add_parser("demo", help="a made-up checkpoint: convert it, run it, hold it to float64 and the limits")
    p.add_argument("--folder", metavar="DIR", help="new folder for the files, kept; default: a temporary one, removed")
    p.add_argument("--layers", type=int, default=3, metavar="N", help="1.8 GB of disk each (default: 3)")
    p.add_argument("--threads", type=int, metavar="N", help="default: one for each core this process may use")
    p.set_defaults(run=demo)

    return root


def main(argv=None):
    """Runs one command; returns the exit code. Errors a user can cause are one line on stderr, not a traceback."""
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        if sys.stdout:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read has enough; what is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        print(f"ktcy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
