"""docs/commands.md has every command with every option that --help has."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("commands_page", ROOT / "tools/commands_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """Of the page, by command."""
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_page_has_the_commands_of_the_help(
    cli: Embermap, maker: ModuleType, sections: dict[str, str]
) -> None:
    commands = maker.names(str(cli.path))
    assert {"convert", "import", "export", "snapshot", "bench"} <= set(commands)
    assert list(sections) == commands


def test_the_page_has_every_option_of_the_help(
    cli: Embermap, maker: ModuleType, sections: dict[str, str]
) -> None:
    for name, section in sections.items():
        text = cli.ok(name, "--help").out
        # Not by the page's own parser: what begins a line, and the names joined to it.
        said = {
            option
            for line in re.findall(r"^  (-\S*)", text, flags=re.M)
            for option in line.split(",")
        }
        told = {
            option
            for cell in re.findall(r"^\| (`-.*?`) \|", section, flags=re.M)
            for option in re.findall(r"(?<=`)--?[a-z][a-z-]*", cell)
        }
        assert len(said) >= 4, name
        assert told == said, name


def test_the_page_says_what_the_help_says(cli: Embermap, maker: ModuleType) -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert page == maker.page(str(cli.path)), "python tools/commands_page.py writes it anew"
