"""The examples recommender.py, knowledge_graph.py, language_model.py and serving.py: their parts,
what they learn in small, and that a run that is killed ends as one that is not."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "python" / "examples"

# Small runs that learn something.
SMALL = {
    "recommender": "--scale 0.01 --steps 150 --batch 256 --memory 8MiB",
    "knowledge_graph": "--entities 1000 --relations 4 --dim 16 --steps 150 --batch 256 "
    "--negatives 64 --memory 4MiB",
    "language_model": "--rows 400000 --steps 30 --batch 8 --hidden 32 --text-size 60kB "
    "--memory 8MiB",
}
# Smaller ones, killed in step 8, after the checkpoint of step 5.
SHORT = {
    "recommender": "--scale 0.002 --steps 12 --batch 64 --memory 8MiB --save-every 5",
    "knowledge_graph": "--entities 400 --relations 3 --dim 8 --steps 12 --batch 64 "
    "--negatives 16 --memory 4MiB --save-every 5",
    "language_model": "--rows 4000 --steps 12 --batch 4 --hidden 16 --text-size 20kB "
    "--memory 4MiB --save-every 5",
}

# Runs an example whose process kills itself in the middle of a step.
KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import embermap as em
import {name} as example
step, taken = em.torch.Optimizer.step, 0
def killed(self, *arguments):
    global taken
    step(self, *arguments)
    taken += 1
    if taken == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
em.torch.Optimizer.step = killed
sys.exit(example.main({arguments!r}))
"""


@pytest.fixture(scope="module")
def examples() -> Any:
    """The modules, by name."""
    sys.path.insert(0, str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    sys.path.remove(str(FOLDER))


def run_script(name: str, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def run_here(
    examples: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Any]:
    """Runs an example in this process, on one thread: torch's sums depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(
        name: str, *arguments: str, folder: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        code = examples(name).main(list(arguments))
        said = capsys.readouterr()
        return subprocess.CompletedProcess([name, *arguments], code, said.out, said.err)

    yield run
    torch.set_num_threads(threads)


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


# --- whole runs -----------------------------------------------------------------------------------


def test_the_recommender_ranks_clicks_above_chance(run_here: Any, tmp_path: Path) -> None:
    found = run_here("recommender", "--device", "cpu", *SMALL["recommender"].split())
    assert found.returncode == 0, found.stderr + found.stdout
    before = number(r"; ([0-9.]+) before, 0\.500 by chance", found.stdout)
    ceiling = number(r"([0-9.]+) by the chances the clicks were drawn with", found.stdout)
    assert abs(before - 0.5) < 0.08
    assert 0.6 < number(r"AUC +([0-9.]+) of clicks", found.stdout) < ceiling < 0.9
    assert not (tmp_path / "recommender-store").exists()


@pytest.mark.parametrize("model", ["transe", "distmult", "complex"])
def test_every_model_of_a_graph_ranks_far_above_chance(run_here: Any, model: str) -> None:
    arguments = [*SMALL["knowledge_graph"].split(), "--model", model, "--device", "cpu"]
    found = run_here("knowledge_graph", *arguments)
    assert found.returncode == 0, found.stderr + found.stdout
    chance = number(r"([0-9.]+) by chance", found.stdout)
    assert chance == pytest.approx(np.mean(1 / np.arange(1, 1001)), abs=1e-4)
    assert number(r"; ([0-9.]+) before", found.stdout) < 3 * chance
    assert number(r"filtered MRR +([0-9.]+) of", found.stdout) > 4 * chance


def test_the_memory_of_a_language_model_is_of_use(run_here: Any) -> None:
    found = run_here("language_model", "--device", "cpu", *SMALL["language_model"].split())
    assert found.returncode == 0, found.stderr + found.stdout
    with_memory = number(r"perplexity +([0-9.]+) of a byte held out with", found.stdout)
    without = number(r"with the memory, ([0-9.]+) without;", found.stdout)
    assert 1 < with_memory < 0.9 * without


def test_readers_serve_whole_commits_while_a_writer_writes(tmp_path: Path) -> None:
    arguments = "--rows 4000 --dim 8 --seconds 2 --every 0.05 --show 0.2 --device cpu --keep"
    found = run_script("serving", *arguments.split(), folder=tmp_path)
    assert found.returncode == 0, found.stderr + found.stdout
    assert re.search(r"reader 0 \(process \d+\) serves commit \d+, version \d+:", found.stdout)
    for reader in (0, 1):
        line = rf"  reader {reader} +([0-9,]+) requests, [0-9,]+ rows, 0 of them wrong; versions"
        assert number(line, found.stdout) > 0
        assert re.search(rf"reader {reader}, latency +p50 [0-9.]+ ms, p90", found.stdout)
    last = number(r"the last is version (\d+)", found.stdout)
    assert last > 0
    # Kept, so that the next one goes on from there.
    again = run_script("serving", *arguments.split(), folder=tmp_path)
    assert again.returncode == 0, again.stderr + again.stdout
    assert "going on after its last commit" in again.stdout
    assert number(r"wrong; versions (\d+) to", again.stdout) >= last
    other = run_script("serving", "--rows", "5000", "--keep", folder=tmp_path)
    assert other.returncode == 1
    assert "--overwrite" in other.stderr
    assert other.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["recommender", "knowledge_graph", "language_model", "serving"])
def test_help_tells_every_option_and_wrong_ones_are_refused(
    name: str,
    examples: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        examples(name).main(["--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert "--store DIR" in said
    assert "(default: " in said
    with pytest.raises(SystemExit) as done:
        examples(name).main(["--batch", "0"])
    assert done.value.code == 2
    assert "not a number of at least" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- runs that are killed -------------------------------------------------------------------------


def tensors(value: Any) -> Any:
    """What a checkpoint has of a model and optimizers, as something that can be compared."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, dict):
        return {name: tensors(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [tensors(part) for part in value]
    return value


@pytest.mark.parametrize("name", SHORT)
def test_a_run_that_is_killed_ends_as_one_that_is_not(
    name: str, run_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [*SHORT[name].split(), "--device", "cpu", "--keep", "--store", "run"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    unbroken = run_here(name, *arguments, folder=whole)
    assert "Summary" in unbroken.stdout, unbroken.stderr

    code = KILLED.format(folder=str(FOLDER), name=name, at=8, arguments=arguments)
    killed = subprocess.run([sys.executable, "-c", code], cwd=broken, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads((broken / "run" / "run.json").read_text())["stage"] == "begun"
    other = run_here(name, *arguments, "--lr", "0.7", folder=broken)
    assert other.returncode == 1
    assert "another --lr" in other.stderr
    resumed = run_here(name, *arguments, folder=broken)
    assert "going on from what it saved last" in resumed.stdout, resumed.stderr
    assert "from step 5 to 12" in resumed.stdout
    assert resumed.returncode == unbroken.returncode
    files = sorted(path.name for path in (whole / "run" / "tables").glob("*.npy"))
    assert files
    for file in files:
        one, same = (np.load(folder / "run" / "tables" / file) for folder in (whole, broken))
        assert one.tobytes() == same.tobytes(), file
    one, same = (
        torch.load(folder / "run" / "model.pt", weights_only=True) for folder in (whole, broken)
    )
    for part in ("model", "optimizer", "note"):
        assert tensors(one[part]) == tensors(same[part]), part
    complete = run_here(name, *arguments, folder=broken)
    assert complete.returncode == 1
    assert "--overwrite" in complete.stderr


def test_a_folder_of_somebody_else_is_left_alone(examples: Any, tmp_path: Path) -> None:
    parts = examples("example_parts")
    (tmp_path / "letter.txt").write_text("dear")
    for overwrite in (False, True):
        with pytest.raises(parts.DemoError, match=r"letter\.txt"):
            parts.Run(tmp_path, {"steps": 3}, overwrite)
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    examples: Any, tmp_path: Path
) -> None:
    parts = examples("example_parts")
    folder = tmp_path / "run"
    first = parts.Run(folder, {"steps": 3}, False)
    (folder / "tables").mkdir()
    (folder / "tables" / "half.npy").write_bytes(b"")
    assert not first.begun
    second = parts.Run(folder, {"steps": 3}, False)
    assert not second.begun
    assert not (folder / "tables").exists()
    second.begin()
    assert parts.Run(folder, {"steps": 3}, False).begun
    with pytest.raises(parts.DemoError, match="--steps"):
        parts.Run(folder, {"steps": 4}, False)


def test_a_step_that_the_log_has_no_room_for_comes_after_a_checkpoint(examples: Any) -> None:
    parts = examples("example_parts")
    done: list[str] = []

    def step() -> None:
        if "saved" not in done:
            raise em.LogFullError("full")
        done.append("stepped")

    parts.step_or_save(step, lambda: done.append("saved"))
    assert done == ["saved", "stepped"]
    parts.step_or_save(step, lambda: done.append("again"))
    assert done == ["saved", "stepped", "stepped"]


# --- the recommender's parts ----------------------------------------------------------------------


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_area_under_the_curve_counts_pairs(examples: Any, levels: int) -> None:
    rng = np.random.default_rng(levels)
    scores = rng.integers(0, levels, 200) / 7
    clicked = rng.random(200) < 0.3
    ones, zeros = scores[clicked], scores[~clicked]
    pairs = (ones[:, None] > zeros) + 0.5 * (ones[:, None] == zeros)
    found = examples("recommender").area_under_curve(scores, clicked)
    assert found == pytest.approx(pairs.mean(), abs=1e-12)


def test_clicks_of_one_kind_have_no_area(examples: Any) -> None:
    with pytest.raises(examples("example_parts").DemoError, match="one kind"):
        examples("recommender").area_under_curve(np.arange(3.0), np.ones(3))


def test_impressions_are_the_same_for_the_same_seed_and_ids_are_in_range(examples: Any) -> None:
    example = examples("recommender")
    rows = dict.fromkeys(example.ROWS, 100)
    one, same, other = (
        example.Clicks.draw((3, 0, k), 500, rows, torch.device("cpu")) for k in (5, 5, 6)
    )
    assert tensors(one.features) == tensors(same.features)
    assert torch.equal(one.clicked, same.clicked)
    assert tensors(one.features) != tensors(other.features)
    for value in one.features.values():
        ids = value[0] if isinstance(value, tuple) else value
        assert 0 <= int(ids.min()) <= int(ids.max()) < 100
    offsets = one.features["history"][1]
    assert offsets[0] == 0
    assert bool((offsets[1:] > offsets[:-1]).all())
    assert 0.1 < one.clicked.mean() < 0.6


# --- the graph's parts ----------------------------------------------------------------------------


def test_other_true_triples_are_found(examples: Any) -> None:
    graph = examples("knowledge_graph").Graph.make(300, 4, 10, 1)
    every = {tuple(triple) for triple in np.concatenate([graph.train, graph.held_out]).tolist()}
    assert len(every) == len(graph.train) + len(graph.held_out)
    tails, heads = set(), set()
    for row, (h, r, t) in enumerate(graph.held_out.tolist()):
        tails |= {(row, e) for e in range(300) if (h, r, e) in every and e != t}
        heads |= {(row, e) for e in range(300) if (e, r, t) in every and e != h}
    assert {tuple(pair) for pair in graph.others(0, 2).tolist()} == tails
    assert {tuple(pair) for pair in graph.others(2, 0).tolist()} == heads
    assert tails
    assert heads


@pytest.mark.parametrize("kind", ["transe", "distmult", "complex"])
def test_ranks_are_those_among_all_entities_without_other_true_ones(
    examples: Any, store: em.Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = examples("knowledge_graph")
    monkeypatch.setattr(example, "BLOCK_ROWS", 64)  # several blocks, the last one smaller
    graph = example.Graph.make(300, 4, 10, 1)
    table = store.create("entities", rows=300, dim=6, init=em.init.Normal(0, 1), seed=2)
    torch.manual_seed(0)
    model = example.KnowledgeGraph(
        example.KINDS[kind], table, graph.relations, 2.0, torch.device("cpu")
    )
    every = {tuple(triple) for triple in np.concatenate([graph.train, graph.held_out]).tolist()}
    rows = table[:].astype(np.float64)
    relations = model.relations.weight.detach().double().numpy()

    def score(h: Any, r: Any, t: Any) -> Any:
        if kind == "transe":
            return -np.linalg.norm(h + r - t, axis=-1)
        if kind == "distmult":
            return (h * r * t).sum(-1)
        h, r, t = (x[..., :3] + 1j * x[..., 3:] for x in (h, r, t))
        return (h * r * t.conj()).sum(-1).real

    reciprocal = []
    for h, r, t in graph.held_out.tolist():
        scores = score(rows[h], relations[r], rows)
        left = [e for e in range(300) if (h, r, e) not in every]
        reciprocal.append(1 / (1 + (scores[left] > scores[t]).sum()))
        scores = score(rows, relations[r], rows[t])
        left = [e for e in range(300) if (e, r, t) not in every]
        reciprocal.append(1 / (1 + (scores[left] > scores[h]).sum()))
    found = example.filtered_mrr(model, graph, torch.device("cpu"))
    assert found == pytest.approx(np.mean(reciprocal), rel=0.02)


def test_batches_of_triples_can_be_had_by_number(examples: Any) -> None:
    example = examples("knowledge_graph")
    graph = example.Graph.make(300, 4, 10, 1)
    one, other = (example.Batches(graph, 64, 8, 3, torch.device("cpu")) for _ in range(2))
    seen = torch.cat([one[k].triples for k in range(one.per_pass)])
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, graph.train.tolist()))
    late = other[2 * one.per_pass + 1]  # as of a run that goes on
    for k in range(one.per_pass, 2 * one.per_pass + 1):
        one[k]
    assert torch.equal(one[2 * one.per_pass + 1].ids, late.ids)


# --- the language model's parts -------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "per_page"), [(4000, 32), (10, 32), (50, 1), (1, 0)])
def test_rows_of_a_place_are_of_its_last_bytes_and_lie_on_one_page(
    examples: Any, rows: int, per_page: int
) -> None:
    example = examples("language_model")
    text = np.frombuffer(b"the cat and the cap and the cat and" * 3, np.uint8)
    ids = example.rows_of_places(text, rows, per_page)
    assert ids.shape == (len(text), 2)
    assert ids.min() >= 0
    assert ids.max() < rows
    if rows == 4000:
        raw = text.tobytes()
        for n, column in ((3, 0), (5, 1)):
            by_gram: dict[bytes, set[int]] = {}
            for i in range(n - 1, len(raw)):
                by_gram.setdefault(raw[i - n + 1 : i + 1], set()).add(int(ids[i, column]))
            assert all(len(found) == 1 for found in by_gram.values())
            assert len({min(found) for found in by_gram.values()}) > 0.8 * len(by_gram)
        assert np.array_equal(ids[4:, 0] // per_page, ids[4:, 1] // per_page)
        assert np.all(ids[4:, 0] != ids[4:, 1])


def test_the_library_has_text_and_short_texts_are_refused(examples: Any, tmp_path: Path) -> None:
    example = examples("language_model")
    text = example.library_text(30_000)
    assert len(text) == 30_000
    assert b" the " in text
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(examples("example_parts").DemoError, match=r"short\.txt has 9 bytes"):
        example.read_text(tmp_path / "short.txt", 1000)


def test_pieces_are_followed_by_the_next_byte_and_held_out_ones_are_not_trained_on(
    examples: Any,
) -> None:
    example = examples("language_model")
    text = np.random.default_rng(0).integers(0, 256, 64 * 100 + 5).astype(np.uint8)
    pieces = example.Pieces(text, 4000, 32, 1, torch.device("cpu"))
    assert not set(pieces.train) & set(pieces.held_out)
    assert len(pieces.train) + len(pieces.held_out) == 100
    read, following, ids = pieces.of(np.array([0, 99]))
    assert np.array_equal(read.numpy()[1], text[99 * 64 : 100 * 64])
    assert np.array_equal(following.numpy()[:, :-1], read.numpy()[:, 1:])
    assert following[0, -1] == text[64]
    assert ids.shape == (2, 64, 2)


# --- serving --------------------------------------------------------------------------------------


def test_a_version_changes_its_eighth_of_the_rows(examples: Any) -> None:
    example = examples("serving")
    ids = np.arange(1000)
    for version in range(1, 30):
        before, after = (example.rows_of(ids, v, 3) for v in (version - 1, version))
        assert np.array_equal((before != after).all(1), ids % 8 == version % 8)
        assert np.array_equal((before != after).any(1), ids % 8 == version % 8)
