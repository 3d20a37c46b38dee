"""Processes killed while they train, open and close a store: what they committed is there, no more.

20 rounds; EMBERMAP_KILL_ROUNDS=100 for more.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter

import embermap as em
import numpy as np

# Without a log a store whose pages are ahead of its last commit would be refused when it is opened.
UNCLEAN_ENDS_ARE_REFUSED = False

ROUNDS = int(os.environ.get("EMBERMAP_KILL_ROUNDS", "20"))
SHAPES = {"a": (3_000, 16), "b": (500, 5)}  # 94 and 5 pages
MEMORY = "160KiB"  # pages are written between commits
STEPS = 4  # from one commit to the next

# What is added by commit `number`, for the child and for the replay.
WORK = f"""
import numpy as np

SHAPES = {SHAPES}
STEPS = {STEPS}

def batches(number):
    rng = np.random.default_rng(number)
    for _ in range(STEPS):
        for name, (rows, dim) in SHAPES.items():
            ids = rng.choice(rows, 30, replace=False)
            yield name, ids, rng.standard_normal((30, dim), np.float32)
"""

CHILD = (
    WORK
    + """
import sys, embermap as em

path, until, memory = sys.argv[1:]
print("opening", flush=True)
store = em.open(path, mode="r+", memory=memory, threads=2)
print("open", flush=True)
if until == "open":
    sys.stdin.read()
number = store.commit_number
while True:
    for name, ids, grads in batches(number + 1):
        store[name].update(ids, grads)
        store[name].gather(ids)
    if until == "close":
        print("closing", flush=True)
        store.close()
        print(number + 1, flush=True)
        sys.stdin.read()
    number = store.commit()
    print(number, flush=True)
"""
)
scope: dict[str, object] = {}
exec(WORK, scope)
batches = scope["batches"]


class Replay:
    """The tables as they are after each commit."""

    def __init__(self, number):
        self.number = number
        self.weight = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.sum = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

    def go_to(self, number):
        while self.number < number:
            self.number += 1
            for name, ids, grads in batches(self.number):
                self.sum[name][ids] += grads * grads
                step = np.float32(0.1) * grads / (np.sqrt(self.sum[name][ids]) + np.float32(1e-10))
                self.weight[name][ids] -= step

    def check(self, store):
        assert store.commit_number == self.number
        for name in SHAPES:
            table = store[name]
            assert np.array_equal(table[:], self.weight[name]), name
            assert np.array_equal(table.read(0, table.rows, field="sum"), self.sum[name]), name
            assert table.verify()["ok"]


def make(path):
    with em.open(path) as store:
        for name, (rows, dim) in SHAPES.items():
            store.create(name, rows=rows, dim=dim, optimizer=em.optim.Adagrad(lr=0.1))
        store.commit()
        return Replay(store.commit_number)


def killed(path, until, rng, lines):
    """What a child printed before it was killed, at most 0.3 s after it had printed `lines` lines.

    They are "opening" and "open", then "closing" or the numbers of its commits.
    """
    command = [sys.executable, "-c", CHILD, str(path), until, MEMORY]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, **pipes)
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        end = time.monotonic() + 60
        while text.count(b"\n") < lines and time.monotonic() < end and child.poll() is None:
            if selector.select(1):
                text += os.read(child.stdout.fileno(), 4096)
    time.sleep(rng.choice((0.001, 0.01, 0.3)) * rng.random())
    child.send_signal(signal.SIGKILL)
    out, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err.decode()
    return (text + out).decode().split()


def refused(path):
    if not UNCLEAN_ENDS_ARE_REFUSED:
        return False
    try:
        em.open(path, mode="r").abandon()
    except em.CorruptError as error:
        return "after its last commit" in str(error)
    return False


def test_what_a_killed_process_committed_is_there_and_nothing_else(path, tmp_path):
    rng = random.Random(int(os.environ.get("EMBERMAP_KILL_SEED", "0")))
    replay = make(path)
    seen: Counter[str] = Counter()
    for turn in range(ROUNDS):
        until = rng.choice(("killed", "killed", "close"))
        commits = rng.randrange(3) if until == "killed" else 0  # that it lives to see
        words = killed(path, until, rng, 3 if until == "close" else 2 + commits)
        seen["awaited"] += commits
        known = max((int(word) for word in words if word.isdigit()), default=replay.number)
        if rng.random() < 0.5 and not refused(path):
            killed(path, "open", rng, 1)
            seen["killed while opening"] += 1
        if refused(path):
            seen["refused"] += 1
            path = tmp_path / f"store-{turn}"
            replay = make(path)
            continue
        with em.open(path, mode=rng.choice(("r+", "r")), memory="8MiB") as store:
            assert store.commit_number in (known, known + 1), f"round {turn}, {until}: {words}"
            seen["commits"] += store.commit_number - replay.number
            replay.go_to(store.commit_number)
            replay.check(store)
        seen[until] += 1
    print(dict(seen))
    assert seen["killed"] + seen["close"] + seen["refused"] == ROUNDS
    assert UNCLEAN_ENDS_ARE_REFUSED or seen["commits"] >= seen["awaited"] > 0
