"""The example billion_ngrams.py: its hashing, its model, and a small run from end to end."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("embermap")

SCRIPT = Path(__file__).parents[2] / "python" / "examples" / "billion_ngrams.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("billion_ngrams_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(SCRIPT.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def small_text(words: int) -> str:
    """Sentences of which each word tells the next one: something to learn."""
    names = [chr(97 + i) + chr(97 + j) for i in range(10) for j in range(10)]
    rng = np.random.default_rng(0)
    at, text = 0, []
    for _ in range(words):
        text.append(names[at])
        at = int(rng.integers(100)) if rng.random() < 0.1 else (7 * at + 3) % 100
    return " ".join(text)


def run_script(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_words_are_runs_of_letters_in_plain_and_packed_files(
    example: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("Oak elm, OAK\n\n1913 Élan", encoding="utf-8")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"elm [ash]"))
    corpus = example.read_corpus([tmp_path / "a", tmp_path / "b.gz"])
    assert corpus.words == ["oak", "elm", "élan", "ash"]
    assert corpus.text.tolist() == [0, 1, 0, 2, 1, 3]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("rows", [7, 10**9, 2**40])
def test_rows_of_ngrams_depend_on_all_their_words_and_their_order(
    example: ModuleType, n: int, rows: int
) -> None:
    words = np.random.default_rng(n).integers(0, 1000, 3000).astype(np.int32)
    ids = example.hash_ngrams(words, n, rows)
    assert ids.shape == (3000 - n + 1,)
    assert ids.min() >= 0
    assert ids.max() < rows
    if rows == 7:
        assert np.all(np.bincount(ids, minlength=7) > 200)
        return
    assert np.array_equal(example.hash_ngrams(words[10:], n, rows), ids[10:])
    known: dict[tuple[int, ...], int] = {}
    for at, row in enumerate(ids):
        gram = tuple(words[at : at + n].tolist())
        assert known.setdefault(gram, row) == row
    assert len(set(known.values())) == len(known)
    assert example.hash_ngrams(words[: n - 1], n, rows).size == 0


def test_a_place_has_the_rows_of_the_words_before_it(example: ModuleType) -> None:
    text = np.arange(100, dtype=np.int32)
    places = example.Places.of(text, 20, 30, 10**9)
    assert places.targets.tolist() == list(range(25, 55))
    for column, n in enumerate(example.ORDERS):
        whole = example.hash_ngrams(text, n, 10**9)
        assert np.array_equal(places.ids[:, column], whole[25 - n : 55 - n])


def test_the_text_used_is_what_fits_the_disk(example: ModuleType) -> None:
    text = np.random.default_rng(1).integers(0, 50, 5000).astype(np.int32)
    whole = np.unique(example.Places.of(text, 0, 4995, 10**6).ids // 4).size
    assert example.pages_of_text(text, 10**6, 4, whole) == 5000
    some = example.pages_of_text(text, 10**6, 4, whole // 2)
    assert 1000 < some < 4000
    assert example.pages_of_text(text, 10**6, 4, 0) == 0


def test_gradients_are_those_of_the_loss(example: ModuleType) -> None:
    rng = np.random.default_rng(2)
    context, targets, noise = (rng.standard_normal((n, 6)) for n in (9, 9, 4))

    def loss(*parts: Any) -> float:
        return float(example.loss_and_gradients(*parts).loss) * 9

    found = example.loss_and_gradients(context, targets, noise)
    for part, gradient in (
        (context, found.rows),
        (targets, found.words[:9]),
        (noise, found.words[9:]),
    ):
        for index in ((0, 0), (3, 5)):
            kept, step = part[index], 1e-5
            part[index] = kept + step
            above = loss(context, targets, noise)
            part[index] = kept - step
            below = loss(context, targets, noise)
            part[index] = kept
            assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-4)
    zeros = np.zeros((9, 6), np.float32)
    untrained = (1 + example.NEGATIVES) * math.log(2)
    assert example.loss_and_gradients(zeros, zeros, noise).loss == pytest.approx(untrained)


def test_page_cache_of_a_file_is_counted(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * (1 << 20))
        file.truncate(1 << 34)  # holes are no page cache
    assert 1 << 20 <= example.page_cache_of(path) < 4 << 20


def test_a_small_run_learns_within_its_memory_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(small_text(20_000))
    out, drawn = tmp_path / "run.json", tmp_path / "memory.png"
    arguments: list[str | Path] = [
        *("--text", tmp_path / "text", "--store", tmp_path / "ngrams", "--steps", "60"),
        *("--rows", "1e9", "--memory", "40MiB", "--batch", "1500", "--dim", "16"),
        *("--disk", "256MiB", "--json", out),
    ]
    if importlib.util.find_spec("matplotlib") is not None:
        arguments += ["--plot", drawn]
    done = run_script(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = json.loads(out.read_text())
    assert run["rows"] == 10**9
    assert run["apparent_bytes"] > 10**9 * 16 * 8
    assert run["disk_bytes"] < 256 << 20
    assert run["steps"] == 60
    assert run["loss_last"] < run["loss_first"] - 0.5
    assert run["within"]
    assert run["peak_resident"] <= run["limit"]
    assert len(run["samples"]["seconds"]) == len(run["samples"]["resident"]) >= 2
    assert "within process + budget" in done.stdout
    assert not (tmp_path / "ngrams").exists()
    assert drawn.exists() == ("--plot" in arguments)


def test_memory_above_the_limit_fails(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(small_text(3_000))
    monkeypatch.setattr(example, "ALLOWANCE", -(1 << 40))
    status = example.main(
        [
            *("--text", str(tmp_path / "text"), "--store", str(tmp_path / "ngrams")),
            *("--rows", "1e6", "--memory", "8MiB", "--batch", "300", "--steps", "40"),
            *("--dim", "8", "--disk", "64MiB"),
        ]
    )
    assert status == 1
    assert not (tmp_path / "ngrams").exists()


def test_what_cannot_work_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("too short")
    (tmp_path / "ngrams").mkdir()
    (tmp_path / "ngrams" / "mine").write_text("keep")
    (tmp_path / "long").write_text(small_text(3_000))
    small = ("--batch", "300", "--rows", "1000")
    for arguments, says in (
        (("--text", "text"), "too few words"),
        (("--text", "absent"), "No such file"),
        (("--text", "long", "--store", "ngrams", *small), "did not make"),
        (("--text", "long", "--disk", "1000000GiB", *small), "are free"),
    ):
        done = run_script(*arguments, folder=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
        assert says in done.stderr
    assert (tmp_path / "ngrams" / "mine").read_text() == "keep"
    assert run_script("--rows", "0", folder=tmp_path).returncode == 2
    assert run_script("--memory", "x", folder=tmp_path).returncode == 2
