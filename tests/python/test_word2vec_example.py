"""The example word2vec.py: its text functions, its loss, and a small run from end to end."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("embermap")

SCRIPT = Path(__file__).parents[2] / "python" / "examples" / "word2vec.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("word2vec_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(SCRIPT.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def small_text(words: int, seed: int = 0) -> str:
    """Sentences of two kinds, whose words never meet: one can tell them apart after training."""
    rng = np.random.default_rng(seed)
    kinds = [
        [f"{kind}{chr(97 + i)}{chr(97 + j)}" for i in range(10) for j in range(10)]
        for kind in ("sea", "land")
    ]
    sentences = []
    for _ in range(words // 50):
        kind = kinds[int(rng.integers(2))]
        sentences.append(" ".join(kind[i] for i in rng.integers(len(kind), size=50)) + ".\n")
    return "".join(sentences)


def run_script(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- text -----------------------------------------------------------------------------------------


def test_words_are_numbered_by_frequency_and_ties_by_first_occurrence(
    example: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Elm oak, OAK; ash-tree's Élan 1913 oak_elm [ae]\n", encoding="utf-8")
    corpus = example.read_corpus([path])
    assert corpus.words == ["oak", "elm", "ash", "tree", "s", "élan", "ae"]
    assert corpus.counts.tolist() == [3, 2, 1, 1, 1, 1, 1]
    assert corpus.ids.tolist() == [1, 0, 0, 2, 3, 4, 5, 0, 1, 6]
    assert corpus.text_bytes == path.stat().st_size


def test_rare_words_are_dropped_from_the_text(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a b a c b a", encoding="utf-8")
    corpus = example.read_corpus([path], min_count=2)
    assert corpus.words == ["a", "b"]
    assert corpus.ids.tolist() == [0, 1, 0, 1, 0]


def test_packed_and_plain_files_give_the_same_words(example: ModuleType, tmp_path: Path) -> None:
    text = small_text(2_000)
    plain, packed = tmp_path / "plain", tmp_path / "packed.dz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    one, other = example.read_corpus([plain]), example.read_corpus([packed])
    assert one.words == other.words
    assert np.array_equal(one.ids, other.ids)
    assert one.text_bytes == other.text_bytes == len(text)


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 64, 1 << 20])
def test_pieces_never_cut_a_word(example: ModuleType, tmp_path: Path, piece_bytes: int) -> None:
    path = tmp_path / "text.txt"
    text = "Überfluß and a word\n\nnext entry\nend".encode()
    path.write_bytes(text)
    pieces = list(sys.modules["example_parts"].text_pieces(path, piece_bytes))
    assert b"".join(pieces) == text
    words = [word for piece in pieces for word in piece.decode().split()]
    assert words == text.decode().split()


def test_a_second_file_starts_a_new_word(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("oak el", encoding="utf-8")
    (tmp_path / "two").write_text("m oak", encoding="utf-8")
    corpus = example.read_corpus([tmp_path / "one", tmp_path / "two"])
    assert corpus.words == ["oak", "el", "m"]


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [10_000, 12_345, 500_000])
def test_one_word_in_a_hundred_is_held_out(example: ModuleType, n: int) -> None:
    trained, held = example.split_held_out(np.arange(n, dtype=np.int32))
    assert sorted([*trained, *held]) == list(range(n))
    assert held.size == pytest.approx(n / 100, rel=0.25)
    assert held.size >= example.CHUNK


def test_only_frequent_words_are_thinned_out(example: ModuleType) -> None:
    counts = np.array([90_000, 9_000, 995, 5])
    keep = example.keep_probability(counts, 1e-3)
    assert np.all(np.diff(keep) >= 0)
    assert keep[0] == pytest.approx(math.sqrt(1e-3 / 0.9) + 1e-3 / 0.9)
    assert keep[3] == 1.0


def test_chunks_hold_the_text_in_order(example: ModuleType) -> None:
    ids = np.arange(1_000, dtype=np.int32)
    chunks = example.to_chunks(ids, np.ones(1_000, np.float32), np.random.default_rng(3))
    assert chunks.shape[1] == example.CHUNK
    assert 0 <= chunks[0, 0] < example.CHUNK
    assert np.array_equal(chunks.reshape(-1), chunks[0, 0] + np.arange(chunks.size))
    assert 1_000 - chunks.size < 2 * example.CHUNK


def test_a_text_below_one_chunk_gives_none(example: ModuleType) -> None:
    ids = np.arange(example.CHUNK - 1, dtype=np.int32)
    chunks = example.to_chunks(ids, np.ones(len(ids), np.float32), np.random.default_rng(3))
    assert chunks.shape == (0, example.CHUNK)


def test_negatives_follow_the_counts(example: ModuleType) -> None:
    counts = np.array([1_000, 100, 10])
    drawn = example.draw_noise(
        example.noise_distribution(counts), 200_000, np.random.default_rng(5)
    )
    expected = counts**0.75 / (counts**0.75).sum()
    assert np.bincount(drawn, minlength=3) / len(drawn) == pytest.approx(expected, abs=0.01)


def test_batches_repeat_for_the_same_seed(example: ModuleType) -> None:
    text = np.random.default_rng(1).integers(50, size=2_000).astype(np.int32)
    counts = np.bincount(text)

    def batches(seed: int) -> list[object]:
        sampler = example.Sampler(
            text,
            np.full(50, 0.5, np.float32),
            example.noise_distribution(counts),
            4,
            8,
            seed,
            torch.device("cpu"),
        )
        return [batch for batch, _ in zip(sampler.batches(), range(10), strict=False)]

    one, same, other = batches(1), batches(1), batches(2)
    assert all(torch.equal(a.context_ids, b.context_ids) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0].context_ids, other[0].context_ids)
    first = one[0]
    assert first.tokens.shape == (4, example.CHUNK)
    assert torch.equal(first.context_ids[:-8], first.tokens.flatten())
    assert one[-1].epochs > 1.0


# --- model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("negatives", [1, 5, 20])
def test_the_loss_of_zero_scores_is_one_plus_negatives_times_ln_2(
    example: ModuleType, negatives: int
) -> None:
    centre = torch.rand(3, example.CHUNK, 8)
    weights = example.window_weights(5, torch.device("cpu"))
    loss = example.skip_gram_loss(
        centre, torch.zeros_like(centre), torch.zeros(16, 8), weights, negatives
    )
    assert loss.item() == pytest.approx((1 + negatives) * math.log(2), rel=1e-6)


def test_the_loss_equals_the_sum_over_pairs(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    chunks, dim, window, negatives = 2, 4, 3, 5
    centre, context = torch.randn(2, chunks, example.CHUNK, dim, generator=generator).double()
    noise = torch.randn(7, dim, generator=generator).double()
    weights = example.window_weights(window, torch.device("cpu")).double()
    loss = example.skip_gram_loss(centre, context, noise, weights, negatives)

    total = weight_sum = 0.0
    for c in range(chunks):
        for i in range(example.CHUNK):
            repel = sum(math.log1p(math.exp(float(centre[c, i] @ row))) for row in noise)
            for j in range(max(0, i - window), min(example.CHUNK, i + window + 1)):
                if i == j:
                    continue
                weight = (window + 1 - abs(i - j)) / window
                attract = math.log1p(math.exp(-float(centre[c, i] @ context[c, j])))
                total += weight * (attract + repel * negatives / len(noise))
                weight_sum += weight
    assert loss.item() == pytest.approx(total / weight_sum, rel=1e-6)


def test_neighbours_are_found_across_blocks(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows:
        def __init__(self, rows: np.ndarray) -> None:
            self.rows = rows

        def gather(self, ids: np.ndarray) -> np.ndarray:
            return self.rows[ids]

        def __getitem__(self, part: slice) -> np.ndarray:
            return self.rows[part]

    rows = np.random.default_rng(2).standard_normal((50, 6)).astype(np.float32)
    monkeypatch.setattr(example, "BLOCK_ROWS", 7)
    queries = np.array([3, 45])
    found = example.nearest(Rows(rows), queries, 40, 5)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for query, neighbours in zip(queries, found, strict=True):
        order = [i for i in np.argsort(-(unit[:40] @ unit[query])) if i != query][:5]
        assert [i for _, i in neighbours] == order


# --- command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), ("4096", 4096), ("1kb", 1000)],
)
def test_sizes(example: ModuleType, text: str, size: int) -> None:
    assert example.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1XB", "1.2.3MB", "0"])
def test_bad_sizes_are_named(example: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        example.parse_size(text)


def test_limits_replace_the_defaults(example: ModuleType) -> None:
    default = example.parse_arguments([])
    assert (default.epochs, default.steps) == (example.DEFAULT_EPOCHS, None)
    assert default.seconds == example.DEFAULT_SECONDS
    steps = example.parse_arguments(["--steps", "3"])
    assert (steps.epochs, steps.seconds, steps.steps) == (None, None, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dim", "0"],
        ["--memory", "much"],
        ["--window", "64"],
        ["--lr", "nan"],
        ["--seconds", "0"],
        ["--batch", "63"],
        ["--epochs", "inf"],
        ["--device", "tpu"],
    ],
)
def test_wrong_usage_exits_with_2(
    example: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        example.main(arguments)
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def assert_one_line_error(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 1
    assert result.stderr.startswith("word2vec.py: error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_a_missing_text_is_one_line(tmp_path: Path) -> None:
    assert_one_line_error(run_script("--text", "absent.txt", folder=tmp_path), "absent.txt")


def test_a_cut_gzip_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(small_text(20_000).encode())[:5_000])
    assert_one_line_error(run_script("--text", "cut.gz", folder=tmp_path), "cut.gz")


def test_too_few_words_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    assert_one_line_error(run_script("--text", "short.txt", folder=tmp_path), "too few words")
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(small_text(20_000), encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear", encoding="utf-8")
    result = run_script("--text", "text.txt", "--store", "mine", "--overwrite", folder=tmp_path)
    assert_one_line_error(result, "mine", "letter")
    assert (tmp_path / "mine" / "letter").read_text(encoding="utf-8") == "dear"


# --- from end to end ------------------------------------------------------------------------------


def held_out(output: str) -> tuple[float, float]:
    found = re.search(r"held out +([0-9.]+) before, ([0-9.]+) after", output)
    assert found, output
    return float(found[1]), float(found[2])


def test_a_small_run_learns_which_words_belong_together(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(small_text(40_000), encoding="utf-8")
    options = [
        "--text",
        "text.txt",
        "--dim",
        "16",
        "--memory",
        "8MiB",
        "--batch",
        "1024",
        "--subsample",
        "1",
        "--steps",
        "150",
        "--words",
        "seaab,landcd,absent",
    ]
    result = run_script(*options, "--keep", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    before, after = held_out(result.stdout)
    assert before == pytest.approx(6 * math.log(2), abs=1e-3)
    assert after < before - 0.1
    for word, kind in (("seaab", "sea"), ("landcd", "land")):
        line = re.search(rf"^  {word} +(.+)$", result.stdout, re.MULTILINE)
        assert line, result.stdout
        assert all(near.startswith(kind) for near in line[1].split(", ")), line[1]
    assert "absent" in result.stdout

    folder = tmp_path / "demo-store"
    words = (folder / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
    assert np.load(folder / "words.npy").shape == (len(words), 16) == (200, 16)

    again = run_script(*options, folder=tmp_path)
    assert_one_line_error(again, "demo-store", "--overwrite")
    again = run_script(*options, "--overwrite", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert held_out(again.stdout) == (before, after)
    assert not folder.exists()


# --- killed, and run again ------------------------------------------------------------------------

LONG_RUN = "--dim 16 --memory 1MiB --batch 512 --subsample 1 --steps 700 --words seaab --keep"


def commit_of(folder: Path) -> int:
    """The last commit as a reader sees it; 0 while there is no store."""
    import embermap as em

    try:
        with em.open(folder / "demo-store" / "tables", mode="r", memory="1MiB") as store:
            return store.commit_number
    except (OSError, ValueError):  # being made
        return 0


def kill_after_commits(folder: Path, commits: int) -> None:
    """Start the run, and end it as a power cut would once that many more commits are made."""
    wanted = commit_of(folder) + commits
    with subprocess.Popen(
        [sys.executable, SCRIPT, "--device", "cpu", "--text", "text.txt", *LONG_RUN.split()],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        while commit_of(folder) < wanted:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_twice_ends_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums of torch depend on its threads
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "text.txt").write_text(small_text(40_000), encoding="utf-8")
    arguments = ("--text", "text.txt", *LONG_RUN.split())
    unbroken = run_script(*arguments, folder=whole)
    assert unbroken.returncode == 0, unbroken.stderr

    kill_after_commits(broken, 2)
    other = run_script(*arguments, "--lr", "0.1", folder=broken)
    assert_one_line_error(other, "demo-store", "--lr", "--overwrite")
    kill_after_commits(broken, 2)
    resumed = run_script(*arguments, folder=broken)
    assert resumed.returncode == 0, resumed.stderr
    found = re.search(r", from step ([0-9,]+) on;", resumed.stdout)
    assert found, resumed.stdout
    assert 100 <= int(found[1].replace(",", "")) < 700
    assert held_out(resumed.stdout) == held_out(unbroken.stdout)
    for name in ("tables/words.npy", "tables/contexts.npy"):  # with the optimizer's state
        one, same = (np.load(folder / "demo-store" / name) for folder in (whole, broken))
        assert one.tobytes() == same.tobytes(), name
    assert json.loads((broken / "demo-store" / "run.json").read_text())["finished"]
