#!/usr/bin/env python3
"""docs/commands.md: every command of `embermap` with every option, as its --help has them.

    python tools/commands_page.py                 # writes the page
    python tools/commands_page.py --check         # exit code 1 if it is another one

--embermap names the program; else EMBERMAP_CLI, else the PATH. tests/python compares as well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
OPENING = """# Commands

What `embermap COMMAND --help` says, of all commands in one place: this page is made of it
(`python tools/commands_page.py`). What of each format is read and written, and what import,
export and convert do with it, is in [formats.md](formats.md).

A table is `STORE/TABLE`: a directory and a name. Rows of other programs are `x.npy`, `x.npy:field`,
`x.h5:/path/to/dataset` and the like; `embermap ls FILE` lists what a file holds. Sizes are written
as `64MiB` or `2GB`, numbers as they are. Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + signal
when stopped; of `diff` 1 differ, 2 failed. Results go to standard output, warnings, errors and
progress to standard error.
"""


class Option(NamedTuple):
    name: str  # "--gzip LEVEL", or of a positional argument "SRC"
    text: str


class Command(NamedTuple):
    name: str
    text: str
    groups: list[tuple[str, list[Option]]]
    examples: list[str]


def run(program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def names(program: str) -> list[str]:
    """Of all commands, as the program's own help lists them."""
    listed = run(program, "--help").partition("Subcommands:\n")[2].partition("\n\n")[0]
    return [line.split()[0] for line in listed.splitlines()]


def command(program: str, name: str) -> Command:
    """What its help says, taken apart: a heading ends with a colon, an entry is indented by two."""
    lines = run(program, name, "--help").splitlines()
    groups: list[tuple[str, list[Option]]] = []
    examples: list[str] = []
    for line in lines[1:]:
        entry = re.match(r"  (\S.*)", line)
        if line.startswith("Usage:") or not line.strip():
            continue
        if entry is None and line.endswith(":"):
            groups.append((line.removesuffix(":"), []))
        elif groups and groups[-1][0] == "Examples":
            examples.append(line.strip())
        elif entry is not None and groups:
            label, _, text = entry[1].partition("  ")
            groups[-1][1].append(Option(label.strip(), text.strip()))
        elif groups and groups[-1][1]:  # a text below a long name, or one that goes on
            last = groups[-1][1][-1]
            groups[-1][1][-1] = last._replace(text=f"{last.text} {line.strip()}".strip())
        else:
            raise ValueError(f"{name} --help: a line in no place: {line!r}")
    groups = [(title, options) for title, options in groups if options]
    return Command(name, lines[0], groups, examples)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def label(option: Option) -> str:
    """Its name without what the help adds about others."""
    words = re.sub(r"\s+(TEXT|REQUIRED|Excludes:.*|Needs:.*)", "", option.name)
    return f"`{words.replace(',', '`, `', words.startswith('-') and words.split()[0].count(','))}`"


def page(program: str) -> str:
    out = [OPENING]
    all_names = names(program)
    out.append(" · ".join(f"[{name}](#{name})" for name in all_names) + "\n")
    for name in all_names:
        one = command(program, name)
        out.append(f"## {name}\n\n{cell(one.text)}.\n")
        for title, options in one.groups:
            if title not in ("Positionals", "Options"):
                out.append(f"**{title}**\n")
            rows = [f"| {label(option)} | {cell(option.text)} |" for option in options]
            heads = "| | |\n| --- | --- |\n"
            out.append(heads + "\n".join(rows) + "\n")
        if one.examples:
            out.append("```sh\n" + "\n".join(one.examples) + "\n```\n")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument(
        "--embermap", default=os.environ.get("EMBERMAP_CLI") or shutil.which("embermap")
    )
    arguments = parser.parse_args()
    if arguments.embermap is None:
        sys.exit("commands_page.py: there is no embermap on the PATH; --embermap names it")
    made = page(arguments.embermap)
    if arguments.check:
        sys.exit(0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == made else 1)
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
