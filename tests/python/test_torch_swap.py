"""Tables trained by optimizers of torch.optim."""

from __future__ import annotations

import copy
import pickle

import embermap as em
import pytest

torch = pytest.importorskip("torch")

ROWS, DIM = 12, 3

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    "RMSprop, all": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, not foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}

TABLES = {
    "Adam": {"exp_avg": DIM, "exp_avg_sq": DIM, "step": None},
    "Adam, amsgrad": {"exp_avg": DIM, "exp_avg_sq": DIM, "max_exp_avg_sq": DIM, "step": None},
    "Adagrad": {"sum": DIM, "step": None},
    "ASGD": {"ax": DIM, "eta": None, "mu": None, "step": None},
    "NAdam": {"exp_avg": DIM, "exp_avg_sq": DIM, "mu_product": None, "step": None},
    "Rprop": {"prev": DIM, "step_size": DIM, "step": None},
    "SGD": {},
    "SGD, momentum": {"momentum_buffer": DIM},
}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def opened(path, device):
    made = em.open(path, memory="16MiB", threads=2, device=None if device == "cpu" else device)
    yield made
    made.abandon()


def filled(store, name="t", dtype="float32", **options):
    table = store.create(name, rows=ROWS, dim=DIM, dtype=dtype, **options)
    values = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    table.scatter(torch.arange(ROWS), values.to(getattr(torch, dtype)))
    return table


def whole(table, field="weight"):
    return table.gather(torch.arange(table.rows), field=field)


def gradients(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, DIM, generator=generator) for _ in range(steps)]


def train(swap, factors, device, ids=None):
    ids = torch.arange(ROWS) if ids is None else ids
    for factor in factors:
        swap.zero_grad()
        (swap(ids.to(device)) * factor[ids].to(swap.weight.dtype).to(device)).sum().backward()
        swap.step()


def by_hand(start, make, factors, device="cpu"):
    """The optimizer over the whole table as a parameter."""
    weight = torch.nn.Parameter(start.clone().to(device))
    optimizer = make([weight])
    for factor in factors:
        weight.grad = factor.to(weight.dtype).to(device)
        optimizer.step()
    return weight.data.cpu(), optimizer.state[weight]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_with_every_row_in_every_batch_it_is_the_optimizer_over_all(opened, device, kind, dtype):
    table = filled(opened, dtype=dtype)
    start = whole(table)
    swap = em.torch.Swap(table, OPTIMIZERS[kind])
    train(swap, gradients(8), device)
    expected, state = by_hand(start, OPTIMIZERS[kind], gradients(8), device)
    assert whole(table).equal(expected)
    for name, own in swap.state_tables.items():
        value = torch.as_tensor(state[name]).cpu()
        assert own.name == f"t.{name}"
        assert whole(own).reshape(-1).equal(value.reshape(-1).to(whole(own).dtype)), name


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_state(opened, kind):
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS[kind])
    assert swap.state_tables == {}
    assert list(opened) == ["t"]
    train(swap, gradients(1), "cpu")
    shapes = {name: own.shape for name, own in swap.state_tables.items()}
    wanted = {n: (1, 1) if dim is None else (ROWS, dim) for n, dim in TABLES[kind].items()}
    assert shapes == wanted
    assert sorted(opened) == sorted(["t", *(f"t.{name}" for name in wanted)])
    # Between steps the optimizer has counts and nothing of rows.
    for value in swap.optimizer.state_dict()["state"].values():
        assert set(value) == {name for name, dim in TABLES[kind].items() if dim is None}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_that_are_not_in_a_batch_stay_as_they_are(opened, device, kind):
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS[kind])
    train(swap, gradients(2), device)
    before = {name: whole(own) for name, own in [("", table), *swap.state_tables.items()]}
    ids = torch.tensor([7, 2, 7])
    train(swap, gradients(3, seed=1), device, ids)
    for name, own in [("", table), *swap.state_tables.items()]:
        if own.rows == 1:
            continue
        changed = (whole(own) != before[name]).any(1).nonzero().reshape(-1).tolist()
        assert set(changed) <= {2, 7}, name
        assert changed or name != ""
    # Those in the batch are as a parameter of their own would be, that was in all batches.
    start = filled(opened, "again")
    expected = em.torch.Swap(start, OPTIMIZERS[kind])
    train(expected, gradients(2), device, torch.tensor([2, 7]))
    train(expected, gradients(3, seed=1), device, ids)
    assert whole(table)[[2, 7]].equal(whole(start)[[2, 7]])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_batch_of_one_row_and_rows_met_later(opened, device, kind):
    """State of one row must not be taken for what is there once, nor the other way round."""
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS[kind])
    one = torch.tensor([4])
    train(swap, gradients(3), device, one)
    expected, _ = by_hand(
        filled(opened, "b").gather(one), OPTIMIZERS[kind], [f[4:5] for f in gradients(3)], device
    )
    assert table.gather(one).equal(expected)
    train(swap, gradients(1), device)
    assert torch.isfinite(whole(table)).all()


@pytest.mark.parametrize("kind", ["Adam", "Rprop", "Adagrad"])
def test_state_of_rows_no_batch_has_had(opened, device, kind):
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS[kind])
    train(swap, gradients(1), device, torch.tensor([1]))
    initial = {"Adam": {"exp_avg": 0}, "Rprop": {"step_size": 0.02}, "Adagrad": {"sum": 0.5}}
    for name, value in initial[kind].items():
        own = whole(swap.state_tables[name])
        assert (own[[0, 2, 11]] == torch.tensor(value, dtype=own.dtype)).all()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_training_goes_on_in_the_next_session(path, device, kind, end):
    where = None if device == "cpu" else device
    with em.open(path, memory="16MiB", device=where) as store:
        table = filled(store)
        start = whole(table)
        swap = em.torch.Swap(table, OPTIMIZERS[kind])
        train(swap, gradients(5)[:3], device)
        store.commit()
        if end == "abandon":  # a step that no commit has
            train(swap, gradients(1, seed=9), device)
            store.abandon()
    with em.open(path, memory="16MiB", device=where) as store:
        swap = em.torch.Swap(store["t"], OPTIMIZERS[kind])
        train(swap, gradients(5)[3:], device)
        expected, _ = by_hand(start, OPTIMIZERS[kind], gradients(5), device)
        assert whole(store["t"]).equal(expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_crash_before_the_first_commit_begins_anew(path, kind):
    store = em.open(path, memory="16MiB")
    table = filled(store)
    start = whole(table)
    store.commit()
    train(em.torch.Swap(table, OPTIMIZERS[kind]), gradients(2), "cpu")
    store.abandon()  # the tables of state are there, their rows are not
    with em.open(path, memory="16MiB") as store:
        assert whole(store["t"]).equal(start)
        train(em.torch.Swap(store["t"], OPTIMIZERS[kind]), gradients(4), "cpu")
        expected, _ = by_hand(start, OPTIMIZERS[kind], gradients(4))
        assert whole(store["t"]).equal(expected)


def test_a_second_swap_goes_on_in_the_same_session(opened, device):
    table = filled(opened)
    start = whole(table)
    for part in (gradients(4)[:2], gradients(4)[2:]):
        train(em.torch.Swap(table, OPTIMIZERS["NAdam"]), part, device)
    assert whole(table).equal(by_hand(start, OPTIMIZERS["NAdam"], gradients(4), device)[0])


def test_state_of_another_optimizer_is_noticed(path):
    with em.open(path, memory="16MiB") as store:
        table = filled(store)
        train(em.torch.Swap(table, OPTIMIZERS["Adam"]), gradients(1), "cpu")
        with pytest.raises(ValueError, match="t.square_avg.*RMSprop|RMSprop"):
            em.torch.Swap(table, OPTIMIZERS["RMSprop"])
        store.remove("t.step")
        store.create("t.step", rows=2, dim=1)
        with pytest.raises(ValueError, match="2 x 1 float32.*1 x 1"):
            em.torch.Swap(table, OPTIMIZERS["Adam"])


def test_state_grows_with_its_table(opened, device):
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    train(swap, gradients(1), device)
    table.resize(ROWS + 5)
    swap.zero_grad()
    swap(torch.tensor([ROWS + 4, 1], device=device)).sum().backward()
    swap.step()
    assert swap.state_tables["exp_avg"].rows == ROWS + 5
    assert table[ROWS + 4].tolist() == pytest.approx([-0.05] * DIM, rel=0.5)


def test_several_backward_passes_and_a_table_twice_in_a_graph(opened, device):
    table = filled(opened)
    start = whole(table)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    theirs = torch.nn.Embedding(ROWS, DIM, device=device)
    theirs.weight.data.copy_(start)
    optimizer = OPTIMIZERS["Adam"](theirs.parameters())
    every = torch.arange(ROWS, device=device)
    for _ in range(2):
        for module in (swap, theirs):
            module.zero_grad()
            (module(every).square().sum() + module(every[:3]).sum()).backward()
            module(torch.tensor([[1, 1], [0, 5]], device=device)).sum().backward()
        swap.step()
        optimizer.step()
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())


def test_bags_and_padding(opened, device):
    table = filled(opened)
    start = whole(table)
    bag = em.torch.EmbeddingBag(table, mode="sum", padding_idx=0)
    swap = em.torch.Swap(bag, OPTIMIZERS["Adam"])
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=0, device=device)
    theirs.weight.data.copy_(start)
    optimizer = OPTIMIZERS["Adam"](theirs.parameters())
    ids = torch.arange(ROWS, device=device).reshape(2, -1)
    for _ in range(3):
        for module in (swap, theirs):
            module.zero_grad()
            module(ids).square().sum().backward()
        swap.step()
        optimizer.step()
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())
    assert whole(table)[0].equal(start[0])


def test_steps_without_gradients_do_nothing(opened, device):
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    swap.step()
    swap(torch.tensor([], dtype=torch.int64, device=device)).sum().backward()
    swap.step()
    assert list(opened) == ["t"]
    train(swap, gradients(1), device)
    after = whole(table)
    swap.zero_grad()
    swap.step()
    assert whole(table).equal(after)
    assert swap.state_tables["step"][0].tolist() == [1]
    swap.requires_grad_(False)
    assert not swap(torch.tensor([1], device=device)).requires_grad


def test_it_is_a_module_with_an_optimizer(opened, device):
    table = filled(opened)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    assert isinstance(swap.optimizer, torch.optim.Adam)
    assert swap.param_groups is swap.optimizer.param_groups
    assert (swap.num_embeddings, swap.embedding_dim) == (ROWS, DIM)
    assert [p.numel() for p in swap.parameters()] == [1]
    assert list(swap.state_dict()) == ["module.anchor"]
    scheduler = torch.optim.lr_scheduler.StepLR(swap.optimizer, 1, 0.5)
    calls = []
    swap.optimizer.register_step_post_hook(lambda *_: calls.append(swap.param_groups[0]["lr"]))
    for factor in gradients(2):
        train(swap, [factor], device)
        scheduler.step()
    assert calls == [0.05, 0.025]
    swap.prefetch([1, 2])

    def closure():
        swap.zero_grad()
        loss = swap(torch.tensor([1], device=device)).sum()
        loss.backward()
        return loss

    before = whole(table)
    assert swap.step(closure).item() == pytest.approx(before[1].sum().item(), rel=1e-5)
    assert not whole(table)[1].equal(before[1])
    with pytest.raises(RuntimeError, match="Swap.step"):
        swap.optimizer.step(closure)
    train(swap, [], device)
    swap.zero_grad()
    swap(torch.tensor([3], device=device)).sum().backward()
    before = whole(table)
    swap.optimizer.step()  # the same as swap.step()
    assert not whole(table)[3].equal(before[3])
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Swap"):
            copying(swap)


def test_loops_that_know_the_optimizer_alone(opened, device):
    """zero_grad() of the optimizer drops gradients; without it they add up."""
    table = filled(opened)
    start = whole(table)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    theirs = torch.nn.Embedding(ROWS, DIM, device=device)
    theirs.weight.data.copy_(start)
    other = OPTIMIZERS["Adam"](theirs.parameters())
    every = torch.arange(ROWS, device=device)
    for module, optimizer in ((swap, swap.optimizer), (theirs, other)):
        for number in range(6):
            if number % 3 != 2:
                optimizer.zero_grad()
            module(every).square().sum().backward()
            (module(every).sum() * number).backward()
            optimizer.step()
            if number == 4:
                optimizer.step()  # the same gradients once more
        optimizer.zero_grad()
        optimizer.step()
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())
    assert swap.state_tables["step"][0].tolist() == [7]


def test_sparse_adam(opened, device):
    table = filled(opened)
    start = whole(table)
    swap = em.torch.Swap(table, lambda p: torch.optim.SparseAdam(p, lr=0.1))
    theirs = torch.nn.Embedding(ROWS, DIM, sparse=True, device=device)
    theirs.weight.data.copy_(start)
    optimizer = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    for ids in ([1, 2, 2], [2, 5], [7]):
        for module in (swap, theirs):
            module.zero_grad()
            module(torch.tensor(ids, device=device)).square().sum().backward()
        swap.step()
        optimizer.step()
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())


class RowWise(torch.optim.Optimizer):
    """Keeps a number for each row, a small tensor for each row, a number and a count."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["scale"] = 1.0
                    state["sum"] = torch.full((p.shape[0],), 0.5, dtype=p.dtype, device=p.device)
                    state["last"] = torch.zeros(p.shape[0], 2, 2, dtype=p.dtype, device=p.device)
                    state["seen"] = torch.zeros(p.shape[0], 1, dtype=torch.int64, device=p.device)
                state["count"] += 1
                state["scale"] *= 0.9
                state["sum"] += p.grad.square().mean(1)
                state["last"] += p.grad[:, :2, None] * p.grad[:, None, :2]
                state["seen"] += (p.grad != 0).any(1, keepdim=True)
                rate = group["lr"] * state["scale"] / state["count"]
                p -= rate * p.grad / state["sum"].sqrt().unsqueeze(1)


def test_state_of_rows_in_other_shapes(path, device):
    where = None if device == "cpu" else device
    with em.open(path, memory="16MiB", device=where) as store:
        table = filled(store)
        start = whole(table)
        swap = em.torch.Swap(table, RowWise)
        train(swap, gradients(4)[:2], device)
        shapes = {name: (own.shape, own.dtype.name) for name, own in swap.state_tables.items()}
        assert shapes == {
            "count": ((1, 1), "int64"),
            "scale": ((1, 1), "float64"),
            "sum": ((ROWS, 1), "float32"),
            "last": ((ROWS, 4), "float32"),
            "seen": ((ROWS, 1), "int64"),
        }
    with em.open(path, memory="16MiB", device=where) as store:
        swap = em.torch.Swap(store["t"], RowWise)
        train(swap, gradients(4)[2:], device)
        expected, state = by_hand(start, RowWise, gradients(4), device)
        assert whole(store["t"]).equal(expected)
        assert whole(store["t.last"]).reshape(ROWS, 2, 2).equal(state["last"].cpu())
        train(swap, gradients(1), device, torch.tensor([1]))
        assert store["t.seen"][:].reshape(-1).tolist() == [4, 5, *[4] * (ROWS - 2)]


class Odd(RowWise):
    """Keeps something that no table can hold."""

    value = None

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["odd"] = self.value(p)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda p: [1, 2], "list"),
        (lambda p: torch.zeros(len(p), dtype=torch.complex64), "complex64"),
        (lambda p: torch.zeros(2, len(p)), "not the same for each row"),
        (lambda p: torch.arange(1.0 * len(p)), "begin"),
    ],
)
def test_state_that_no_table_can_hold(opened, value, text):
    kind = type("Kind", (Odd,), {"value": staticmethod(value)})
    with pytest.raises(ValueError, match=text):
        em.torch.Swap(filled(opened), kind)


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        (lambda p: torch.optim.LBFGS(p), TypeError, "LBFGS"),
        (lambda p: None, TypeError, "None"),
        (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), TypeError, "function"),
        ("Adam", TypeError, "function"),
        (
            lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.zeros(1))], lr=1.0),
            ValueError,
            "no other",
        ),
        (lambda p: torch.optim.Adam(p, lr=-1), ValueError, "learning rate"),
    ],
)
def test_factories_that_cannot_be(opened, factory, error, text):
    with pytest.raises(error, match=text):
        em.torch.Swap(filled(opened), factory)


class Trust(RowWise):
    """As LARS: the size of a step is by the norms of the whole weight and its gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.data.norm() / (p.grad.norm() + 1e-8)
                    p.data -= group["lr"] * ratio * p.grad


class Noisy(RowWise):
    """Draws random numbers for each row: rows stay alone."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] * (p.grad + torch.randn_like(p))


@pytest.mark.parametrize(
    "factory",
    [
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.Muon(p),
        Trust,
    ],
)
@pytest.mark.parametrize("dim", [1, DIM])
def test_optimizers_that_mix_rows_are_refused_by_name(opened, factory, dim):
    table = opened.create("t", rows=ROWS, dim=dim)
    name = type(factory([torch.nn.Parameter(torch.zeros(2, dim))])).__name__
    with pytest.raises(TypeError, match=f"{name} cannot train a table: .* other rows"):
        em.torch.Swap(table, factory)
    assert list(opened) == ["t"]


def test_random_numbers_of_an_optimizer_are_no_mixing_and_the_callers_stay(opened):
    before = torch.get_rng_state()
    swap = em.torch.Swap(filled(opened), Noisy)
    assert torch.equal(torch.get_rng_state(), before)
    swap(torch.tensor([1])).sum().backward()
    swap.step()
    assert not torch.equal(torch.get_rng_state(), before)


def test_tables_that_cannot_be(opened):
    for table in ("t", torch.nn.Embedding(2, 2), opened.create("i", rows=2, dim=2, dtype="int8")):
        with pytest.raises(TypeError):
            em.torch.Swap(table, OPTIMIZERS["Adam"])


def test_a_step_that_fails_changes_nothing_and_can_be_made_again(opened, device, monkeypatch):
    table = filled(opened)
    start = whole(table)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    train(swap, gradients(2)[:1], device)
    after = whole(table)
    swap.zero_grad()
    every = torch.arange(ROWS, device=device)
    (swap(every) * gradients(2)[1].to(device)).sum().backward()

    def failing(*_, **__):
        raise RuntimeError("out of luck")

    handle = swap.optimizer.register_step_pre_hook(failing)
    with pytest.raises(RuntimeError, match="luck"):
        swap.step()
    handle.remove()
    assert whole(table).equal(after)
    real = em.Table.gather
    monkeypatch.setattr(em.Table, "gather", failing)
    with pytest.raises(RuntimeError, match="luck"):
        swap.step()
    monkeypatch.setattr(em.Table, "gather", real)
    assert whole(table).equal(after)
    swap.step()
    assert whole(table).equal(by_hand(start, OPTIMIZERS["Adam"], gradients(2), device)[0])


def test_rows_that_could_not_go_back_go_back_later(opened, device, monkeypatch):
    """Weights and state are never of different steps, once the disk has room again."""
    table = filled(opened)
    start = whole(table)
    swap = em.torch.Swap(table, OPTIMIZERS["Adam"])
    train(swap, gradients(3)[:1], device)
    real = em.Table.scatter
    state = {"left": 2}

    def scatter(self, *arguments, **options):
        if state["left"] == 0:
            raise em.LogFullError("full")
        state["left"] -= 1
        return real(self, *arguments, **options)

    monkeypatch.setattr(em.Table, "scatter", scatter)
    swap.zero_grad()
    every = torch.arange(ROWS, device=device)
    (swap(every) * gradients(3)[1].to(device)).sum().backward()
    with pytest.raises(em.LogFullError):
        swap.step()
    state["left"] = 100
    swap.step()  # makes that step whole
    assert whole(table).equal(by_hand(start, OPTIMIZERS["Adam"], gradients(2), device)[0])
    assert swap.module.weight.grad is not None  # gradients stay, as after any step
    train(swap, gradients(3)[2:], device)
    assert whole(table).equal(by_hand(start, OPTIMIZERS["Adam"], gradients(3), device)[0])


def test_a_reader_looks_up_and_does_not_step(path):
    with em.open(path) as store:
        train(em.torch.Swap(filled(store), OPTIMIZERS["Adam"]), gradients(1), "cpu")
    with em.open(path, mode="r") as store:
        swap = em.torch.Swap(store["t"], OPTIMIZERS["Adam"])
        before = whole(store["t"])
        swap(torch.tensor([1])).sum().backward()
        with pytest.raises(PermissionError):
            swap.step()
        assert whole(store["t"]).equal(before)


def test_nothing_of_the_size_of_the_table_is_made(path, run_python):
    code = """
        import resource, sys, torch, embermap as em
        torch.set_num_threads(1)
        store = em.open(sys.argv[1], memory="8MiB", threads=1)
        table = store.create("t", rows=200_000_000, dim=64)
        swap = em.torch.Swap(table, lambda p: torch.optim.Rprop(p, lr=0.01))
        def step(ids):
            swap.zero_grad()
            swap(ids).square().sum().backward()
            swap.step()
        step(torch.arange(100))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(5):
            step(torch.randint(0, 200_000_000, (1024,)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 << 10, f"{grown} KiB"
        store.abandon()
    """
    run_python(code, path)
