"""Options that the benchmarks have in common, each defined once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch

from benchmarks.models import WORKLOADS


def benchmark_parser(module: str, doc: str | None, *, models: Iterable[str] | None = None,
                     known: Iterable[str] = WORKLOADS, rounds: int | None = None,
                     threads: int | None = None,
                     time_limit: float | None = None) -> argparse.ArgumentParser:
    """Create the parser of the benchmark in this module; the description is its first line.

    It has the options that a default is given for: `--model` (some of `known`), `--rounds`,
    `--threads`, `--time-limit`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}",
                                     description=(doc or "").splitlines()[0])
    if models is not None:
        add_names(parser, "--model", known, models)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often each is timed")
    if threads is not None:
        parser.add_argument("--threads", type=int, default=threads)
    if time_limit is not None:
        parser.add_argument("--time-limit", type=float, default=time_limit,
                            help="seconds for each plan")
    return parser


def add_names(parser: argparse.ArgumentParser, flag: str, known: Iterable[str],
              default: Iterable[str] | None = None, *, separator: str = ",") -> None:
    """Add an option whose value is a list of names, all of them among `known`, or "all"; any other
    name ends the process."""
    names = tuple(known)

    def chosen(text: str) -> tuple[str, ...]:
        given = names if text == "all" else tuple(text.split(separator))
        if unknown := [name for name in given if name not in names]:
            raise argparse.ArgumentTypeError(f"expected {flag.strip('-')} of {', '.join(names)}; "
                                             f"got {', '.join(unknown)}")
        return given

    parser.add_argument(flag, type=chosen, default=names if default is None else tuple(default),
                        help=f"of {', '.join(names)}, separated by {separator!r}; or all")


def add_numbers(parser: argparse.ArgumentParser, flag: str, default: Iterable[float],
                help: str) -> None:
    """Add an option whose value is a list of numbers, separated by commas."""
    def numbers(text: str) -> list[float]:
        try:
            return [float(number) for number in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected {flag.strip('-')} such as .9,.8; got {text}") from None

    parser.add_argument(flag, type=numbers, default=list(default), help=help)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; `--threads`, if it is one of them, becomes torch's number of threads."""
    arguments = parser.parse_args(argv)
    if "threads" in arguments:
        torch.set_num_threads(arguments.threads)
    return arguments
