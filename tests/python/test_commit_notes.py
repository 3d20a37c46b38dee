"""Notes of commits and the list of them."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from datetime import datetime, timezone

import embermap as em
import numpy as np
import pytest

NOTE = {
    "step": 1000,
    "loss": 0.1,
    "best": True,
    "parent": None,
    "tags": ["α", {"lr": 1e-300}],
    "big": 2**64 - 1,
}


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_a_note_comes_back_as_it_was_given(path, durability):
    with em.open(path, durability=durability) as store:
        table = store.create("t", rows=10, dim=2)
        assert (store.note, store.commits()) == (None, [])
        table[[1]] = np.ones((1, 2), "f4")
        assert store.commit(note=NOTE) == 1
        assert store.commit() == 1
        assert store.commit(note={}) == 2
        with em.open(path, mode="r") as reader:
            table[[1]] = np.zeros((1, 2), "f4")
            assert store.commit() == 3
            assert [commit.note for commit in store.commits()] == [NOTE, {}, None]
            assert [commit.number for commit in reader.commits()] == [1, 2]
            assert reader.note == {}
            reader.refresh()
            assert reader.commits() == store.commits()
            assert reader.note is None
    with em.open(path, mode="r") as reader:
        assert [commit.note for commit in reader.commits()] == [NOTE, {}, None]
        for commit in reader.commits():
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", commit.time)
            at = datetime.fromisoformat(commit.time.replace("Z", "+00:00"))
            assert abs((datetime.now(timezone.utc) - at).total_seconds()) < 600


def test_numbers_of_numpy_and_mappings_are_taken(path):
    with em.open(path) as store:
        note = OrderedDict(a=np.float32(0.5), b=np.int64(7), c=(1, 2), d=np.bool_(True))
        store.commit(note=note)
        assert store.note == {"a": 0.5, "b": 7, "c": [1, 2], "d": True}


@pytest.mark.parametrize(
    ("note", "error", "text"),
    [
        ([1], TypeError, "note must be a dict"),
        ({"loss": math.nan}, ValueError, r"note\['loss'\] is nan, which JSON does not have"),
        ({"a": [0, {"b": -math.inf}]}, ValueError, r"note\['a'\]\[1\]\['b'\] is -inf"),
        ({"id": 2**64}, ValueError, r"note\['id'\] is 18446744073709551616, which 64 bits"),
        ({"w": np.zeros(3)}, TypeError, r"note\['w'\] is a ndarray, which is no value of JSON"),
        ({1: 2}, TypeError, "note has the key 1; keys must be strings"),
        ({"a": "\ud800"}, ValueError, r"note\['a'\] has '\\ud800', which is not valid Unicode"),
        ({"a": "x" * 65536}, ValueError, "65545 bytes of JSON; a commit has room for 65536"),
    ],
)
def test_what_a_note_cannot_hold_is_named(path, note, error, text):
    with em.open(path) as store:
        with pytest.raises(error, match=text):
            store.commit(note=note)
        assert store.commit_number == 0


def test_a_note_that_never_ends_is_refused(path):
    note = {}
    note["self"] = note
    with em.open(path) as store, pytest.raises(ValueError, match="nested more than 12 deep"):
        store.commit(note=note)


def test_only_the_last_thousand_are_kept(path):
    with em.open(path) as store:
        for i in range(1, 1011):
            store.commit(note={"i": i})
        assert [commit.note["i"] for commit in store.commits()] == list(range(11, 1011))
    with em.open(path, mode="r") as reader:
        assert [commit.note["i"] for commit in reader.commits()] == list(range(11, 1011))
    assert len((path / "commits.jsonl").read_text().splitlines()) == 1000
