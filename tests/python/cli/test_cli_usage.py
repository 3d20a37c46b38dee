"""Command line, exit codes, streams."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

COMMANDS = [
    "create",
    "info",
    "ls",
    "import",
    "export",
    "convert",
    "verify",
    "materialize",
    "recover",
    "resize",
    "remove",
    "bench",
]


def test_version_is_one_line(cli: Embermap) -> None:
    name, version = cli.ok("--version").out.split()
    assert name == "embermap"
    assert all(part.isdigit() for part in version.split("."))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(cli: Embermap, command: str) -> None:
    assert command in cli.ok("--help").out
    text = cli.ok(command, "--help").out
    assert f"  embermap {command} " in text
    for option in ["--memory", "--json", "--quiet"]:
        assert option in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["info"],
        ["info", ""],
        ["info", "a", "b"],
        ["info", "a", "--bogus"],
        ["create", "t/x"],
        ["create", "t/x", "--rows", "4"],
        ["create", "x", "--rows", "4", "--dim", "2"],
        ["create", "x/", "--rows", "4", "--dim", "2"],
        ["create", "/", "--rows", "4", "--dim", "2"],
        ["create", "t/..", "--rows", "4", "--dim", "2"],
        ["create", "", "--rows", "4", "--dim", "2"],
        ["create", "t/x", "--rows", "4", "--dim", "0"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--dtype", "float33"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--page-size", "5000"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--init", "normal:1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--init", "normal:0:-1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--init", "uniform:2:1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--init", "constant:nan"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "lion"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--lr", "0.1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "sgd", "--eps", "1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "sgd", "--lr", "-1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "sgd", "--nesterov"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:lr"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:lr=x"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:momentum=0.9"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:betas=0.9"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:betas=0.9:1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:amsgrad=1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:step=table"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:lr=1,lr=2"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "adam:lr=1", "--lr", "2"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "none:lr=1"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "rmsprop", "--nesterov"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--optimizer", "sgd:clip_row=0"],
        [
            "create",
            "t/x",
            "--rows",
            "4",
            "--dim",
            "2",
            "--optimizer",
            "adam:stochastic_rounding=true",
        ],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--dtype", "int8", "--optimizer", "sgd"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--memory", "lots"],
        ["create", "t/x", "--rows", "4", "--dim", "2", "--memory", "0"],
        ["convert", "a.npy"],
        ["convert", "a.npy", "b.npy", "--gzip", "4"],
        ["convert", "a.npy", "b.h5:/v", "--gzip", "10"],
        ["convert", "a.npy", "b.npy", "--dtype", "complex64"],
        ["import", "a.npy", "t"],
        ["import", "a.npy", "t/x", "--read-only"],
        ["import", "a.npy:f", "t/x", "--field", "g"],
        ["import", "a.h5:/v", "t/x", "--in-place"],
        ["import", "a.npy", "t/x", "--in-place", "--optimizer", "adagrad"],
        ["export", "t/x:", "b.npy"],
        ["resize", "t/x"],
        ["resize", "t/x", "--rows", "-3"],
    ],
)
def test_wrong_usage_exits_2_with_one_line_and_a_hint(
    cli: Embermap, tmp_path: Path, arguments: list[str]
) -> None:
    result = cli(*arguments, cwd=tmp_path)
    assert result.code == 2, result
    assert result.out == ""
    assert "--help'" in result.error
    if arguments and arguments[0] in COMMANDS:
        assert f"embermap {arguments[0]} --help" in result.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0", 0),
        ("7", 7),
        ("1_000", 1000),
        ("1e3", 1000),
        ("1.5e3", 1500),
        ("1.50E+1", 15),
        ("0e99", 0),
        ("12_5e1", 1250),
    ],
)
def test_counts_are_exact(cli: Embermap, tmp_path: Path, text: str, rows: int) -> None:
    assert (
        cli.ok("create", "t/x", "--rows", text, "--dim", "3", "--json", cwd=tmp_path).json["rows"]
        == rows
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1.5",
        "1.25e1",
        "2G",
        "1e",
        "1e-3",
        "_1",
        "1_",
        "1__0",
        "0x10",
        "+1",
        "1e20",
        "nan",
    ],
)
def test_other_counts_are_refused(cli: Embermap, tmp_path: Path, text: str) -> None:
    result = cli("create", "t/x", "--rows", text, "--dim", "3", cwd=tmp_path)
    assert result.code == 2
    assert "--rows" in result.error
    assert not (tmp_path / "t").exists()


def test_results_go_to_standard_output_and_quiet_silences_them(
    cli: Embermap, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    assert cli.ok("convert", "a.npy", "b.npy", cwd=tmp_path).out == "b.npy: 3 x 2 float32\n"
    assert cli.ok("convert", "a.npy", "c.npy", "--quiet", cwd=tmp_path).out == ""
    report = cli.ok("convert", "a.npy", "d.npy", "--json", "--quiet", cwd=tmp_path)
    assert report.out.count("\n}\n") == 1
    assert report.json["rows"] == 3


def run_with_stdout(
    cli: Embermap, stdout: int, *arguments: str, cwd: Path
) -> tuple[int, list[str]]:
    done = subprocess.run(
        [cli.path, *arguments],
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.decode().splitlines()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["info", "a.npy"]])
def test_an_unwritable_standard_output_is_an_error(
    cli: Embermap, tmp_path: Path, arguments: list[str]
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    # A pipe nobody reads: no death by SIGPIPE.
    read_end, write_end = os.pipe()
    os.close(read_end)
    code, lines = run_with_stdout(cli, write_end, *arguments, cwd=tmp_path)
    os.close(write_end)
    assert (code, len(lines)) == (1, 1)
    assert "standard output: Broken pipe" in lines[0]
    # A full device.
    full = os.open("/dev/full", os.O_WRONLY)
    code, lines = run_with_stdout(cli, full, *arguments, cwd=tmp_path)
    os.close(full)
    assert (code, len(lines)) == (1, 1)
    assert "standard output: No space left on device" in lines[0]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_descriptors_never_become_data_files(
    cli: Embermap, tmp_path: Path, closed: str
) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(tmp_path / "a.npy", rows)
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$@" {closed}', cli.path, "convert", "a.npy", "b.npy"],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if ">&-" in closed.split() or " >&-" in closed:
        assert done.returncode == 1
        assert not (tmp_path / "b.npy").exists()
    else:
        assert done.returncode == 0
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$@" -q --overwrite {closed}', cli.path, "convert", "a.npy", "b.npy"],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)


def test_json_is_one_object_whatever_bytes_a_path_has(cli: Embermap, tmp_path: Path) -> None:
    name = b"v\xff\n\xc3\xa4 .npy"
    path = tmp_path / os.fsdecode(name)
    np.save(path, np.zeros((3, 2), np.float32))
    facts = cli.info(path)
    assert facts["path"].endswith("v\\xff\\x0aä .npy")
    assert facts["shape"] == [3, 2]
    done = subprocess.run([cli.path, "info", path], capture_output=True, check=True)
    done.stdout.decode()  # whatever is printed is text
    json.dumps(facts)


def test_errors_are_one_line_whatever_bytes_a_path_has(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"gone\xff\nx.npy")
    assert "gone\\xff\\x0ax.npy: No such file or directory" in cli.fails("info", path).error


def test_an_unknown_command_and_unexpected_arguments_are_named_in_order(
    cli: Embermap, tmp_path: Path
) -> None:
    result = cli("foo", "--bar")
    assert (result.code, "unknown command 'foo'" in result.error) == (2, True), result
    result = cli("info", "a", "--first", "--second", cwd=tmp_path)
    assert (result.code, "'--first' '--second'" in result.error) == (2, True), result


@pytest.mark.parametrize("name", ["nothing", "nothing.data", "nothing:part", "no/folder/x.dat"])
def test_a_file_that_is_not_there_is_told_as_such(cli: Embermap, tmp_path: Path, name: str) -> None:
    for command in (["convert", name, "y.npy"], ["ls", name], ["import", name, "s/t"]):
        cli.fails(*command, cwd=tmp_path, says=["No such file", name])
