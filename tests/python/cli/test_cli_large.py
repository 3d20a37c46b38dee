"""The command line on tables of a terabyte, none of which is on disk."""

from __future__ import annotations

import pytest


def disk_bytes(folder):
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


@pytest.mark.parametrize(
    "shape",
    [
        ["--rows", "1e9", "--dim", "128", "--optimizer", "adagrad"],
        ["--rows", "8589934592", "--dim", "1"],
        ["--rows", "4294979641", "--dim", "3", "--dtype", "int8"],
    ],
)
def test_create_info_verify_resize_remove(cli, tmp_path, shape):
    table = tmp_path / "s" / "t"
    made = cli.ok("create", table, *shape, "--json").json
    assert disk_bytes(tmp_path / "s") < 10 << 20
    told = cli.info(table)
    assert told["rows"] == made["rows"] == int(float(shape[1]))
    assert told["written_pages"] == 0
    assert cli.ok("verify", table, "--json").json["ok"]
    cli.ok("resize", table, "--rows", str(2**32 + 7))
    assert cli.info(table)["rows"] == 2**32 + 7
    assert cli.ok("verify", table, "--json").json["ok"]
    assert disk_bytes(tmp_path / "s") < 10 << 20
    cli.ok("remove", table)
    assert not (tmp_path / "s" / "t.npy").exists()
