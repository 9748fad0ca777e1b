"""What goes to stdout: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType

from planner.reporters.table import plain_text


def print_report(report: RenderableType) -> None:
    """In colour and to its width on a terminal, as plain text of a fixed width elsewhere."""
    if sys.stdout.isatty():
        Console(highlight=False).print(report)
    else:
        print(plain_text(report))


def print_json(document: dict[str, Any]) -> None:
    """One document; keys in their order, text as it is."""
    print(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2))
