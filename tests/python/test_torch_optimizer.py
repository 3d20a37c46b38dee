"""Optimizers of tables where loops, schedulers and hooks expect one of torch.optim."""

from __future__ import annotations

import copy
import dataclasses

import embermap as em
import pytest

torch = pytest.importorskip("torch")

ROWS, DIM = 12, 3

SCHEDULERS = torch.optim.lr_scheduler

KINDS = {
    "LambdaLR": lambda o: SCHEDULERS.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: SCHEDULERS.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: SCHEDULERS.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: SCHEDULERS.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: SCHEDULERS.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: SCHEDULERS.LinearLR(o, 0.5, 1.0, 3),
    "ExponentialLR": lambda o: SCHEDULERS.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: SCHEDULERS.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: SCHEDULERS.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: SCHEDULERS.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: SCHEDULERS.CyclicLR(o, 0.01, 0.2, 2),
    "OneCycleLR": lambda o: SCHEDULERS.OneCycleLR(o, 0.3, 6),
    "SequentialLR": lambda o: SCHEDULERS.SequentialLR(
        o, [SCHEDULERS.ConstantLR(o, 0.1, 2), SCHEDULERS.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: SCHEDULERS.ChainedScheduler(
        [SCHEDULERS.ConstantLR(o, 0.1, 2), SCHEDULERS.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: SCHEDULERS.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def every_scheduler():
    """Names of what torch has, so that a new one shows up here."""
    found = [
        name
        for name, value in vars(SCHEDULERS).items()
        if isinstance(value, type)
        and issubclass(value, SCHEDULERS.LRScheduler)
        and not name.startswith("_")
    ]
    return sorted(set(found) - {"LRScheduler"})


@pytest.fixture
def table(store):
    return store.create(
        "t", rows=ROWS, dim=DIM, optimizer=em.optim.SGD(0.1, momentum=0.8), init=em.init.Normal()
    )


def both(table):
    """Our optimizer and torch's over the same rows."""
    ours, theirs = em.torch.Embedding(table), torch.nn.Embedding(ROWS, DIM)
    theirs.weight.data.copy_(torch.from_numpy(table[:]))
    return (
        (ours, em.torch.Optimizer(ours)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.8)),
    )


def assert_same(table, theirs):
    torch.testing.assert_close(torch.from_numpy(table[:]), theirs.weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", every_scheduler())
def test_schedulers(table, kind):
    pairs = both(table)
    schedulers = [KINDS[kind](optimizer) for _, optimizer in pairs]
    every = torch.arange(ROWS)
    for step in range(6):
        for (module, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            optimizer.zero_grad()
            module(every).square().sum().backward()
            optimizer.step()
            scheduler.step(*([float(step)] if kind == "ReduceLROnPlateau" else []))
        groups = [optimizer.param_groups[0] for _, optimizer in pairs]
        for name in ("lr", "momentum"):
            assert groups[0][name] == groups[1][name], (step, name)
    assert_same(table, pairs[1][0])
    state = schedulers[0].state_dict()
    schedulers[0].load_state_dict(state)


# Hyperparameters of the step before have a part in a step of these: NAdam's product of mu, and the
# rate of ASGD, which torch makes at the end of each step for the next.
CYCLED = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True, "eps": 1e-2},
    "Adam": {"lr": 0.01, "eps": 1e-3},
    "AdamW": {"lr": 0.01, "eps": 1e-3, "amsgrad": True},
    "Adamax": {"lr": 0.01, "eps": 1e-3},
    "NAdam": {"lr": 0.01, "eps": 1e-3},
    "RAdam": {"lr": 0.01, "eps": 1e-3},
    "ASGD": {"lr": 0.1, "lambd": 0.01, "t0": 5},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01},
    "Adadelta": {"lr": 1.0},
}


@pytest.mark.parametrize("schedule", ["CyclicLR", "OneCycleLR"])
@pytest.mark.parametrize("kind", CYCLED)
def test_cycles_of_rate_and_momentum_are_torchs(path, kind, schedule):
    """Also over a session that ends in the middle of a cycle."""
    options = CYCLED[kind]
    cycled = kind not in ("ASGD", "Adagrad", "Adadelta")

    def scheduled(optimizer):
        if schedule == "CyclicLR":
            return SCHEDULERS.CyclicLR(
                optimizer, 0.02, 0.2, 3, base_momentum=0.5, max_momentum=0.95, cycle_momentum=cycled
            )
        return SCHEDULERS.OneCycleLR(
            optimizer, 0.3, 30, base_momentum=0.5, max_momentum=0.95, cycle_momentum=cycled
        )

    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(30, ROWS, DIM, generator=generator)
    ids = torch.arange(ROWS)
    store = em.open(path, memory="4MiB", threads=2)
    table = store.create(
        "t", rows=ROWS, dim=DIM, optimizer=getattr(em.optim, kind)(**options), init=em.init.Normal()
    )
    theirs = torch.nn.Parameter(torch.from_numpy(table[:]))
    other = getattr(torch.optim, kind)([theirs], **options)
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding)
    schedulers = [scheduled(optimizer), scheduled(other)]
    for step, gradient in enumerate(gradients):
        if step == 14:
            kept = optimizer.state_dict(), schedulers[0].state_dict()
            store.close()
            store = em.open(path, memory="4MiB", threads=2)
            table = store["t"]
            embedding = em.torch.Embedding(table)
            optimizer = em.torch.Optimizer(embedding)
            schedulers[0] = scheduled(optimizer)
            optimizer.load_state_dict(kept[0])
            schedulers[0].load_state_dict(kept[1])
        optimizer.zero_grad()
        embedding(ids).backward(gradient)
        theirs.grad = gradient.clone()
        for each in (optimizer, other, *schedulers):
            each.step()
    torch.testing.assert_close(torch.from_numpy(table[:]), theirs.data, rtol=1e-5, atol=1e-6)
    store.abandon()


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
def test_what_steps_carry_on_is_kept_by_commits_alone(path, kind):
    """A crash takes the steps after the last commit, and what they would carry on, with it."""
    options = CYCLED[kind]
    ids, gradient = torch.arange(ROWS), torch.ones(ROWS, DIM)

    def train(table, steps, first):
        for step in range(first, first + steps):
            if kind == "NAdam":
                betas = (0.5 + 0.04 * (step % 10), 0.999)
                table.optimizer = dataclasses.replace(table.optimizer, betas=betas)
                table.update(ids, gradient)
            else:
                table.update(ids, gradient, lr=0.01 * (1 + step % 7))

    made = getattr(em.optim, kind)(**options)
    with em.open(path, memory="4MiB", threads=2) as store:
        whole = store.create("whole", rows=ROWS, dim=DIM, optimizer=made)
        train(whole, 20, 0)
        expected = whole[:]
        train(store.create("t", rows=ROWS, dim=DIM, optimizer=made), 9, 0)
        store.commit()
        train(store["t"], 4, 9)
        store.abandon()
    with em.open(path, memory="4MiB", threads=2) as store:
        assert store["t"].step == 9
        train(store["t"], 11, 9)
        assert (store["t"][:] == expected).all()


@pytest.mark.parametrize("kind", ["CyclicLR", "OneCycleLR"])
def test_momentum_cannot_be_cycled_where_there_is_none(store, kind):
    adagrad = store.create("a", rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad(0.1))
    with pytest.raises(ValueError, match="momentum"):  # as for torch.optim.Adagrad
        KINDS[kind](em.torch.Optimizer(em.torch.Embedding(adagrad)))
    plain = store.create("p", rows=ROWS, dim=DIM, optimizer=em.optim.SGD(0.1))
    embedding = em.torch.Embedding(plain)
    optimizer = em.torch.Optimizer(embedding)
    KINDS[kind](optimizer)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="only hyperparameters"):
        optimizer.step()
    assert plain.step == 0


def test_a_rate_that_is_a_tensor(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert table.optimizer.lr == 0.25


def test_every_field_of_the_tables_optimizer_is_in_the_group(table):
    optimizer = em.torch.Optimizer(em.torch.Embedding(table))
    (group,) = optimizer.param_groups
    for field in dataclasses.fields(table.optimizer):
        if field.name != "step":
            assert group[field.name] == getattr(table.optimizer, field.name)
            assert field.name in optimizer.defaults
    group["weight_decay"] = 0.25
    optimizer.step()
    assert table.optimizer.weight_decay == 0  # nothing to do


def test_groups_with_hyperparameters_of_their_own(store):
    one, two = (
        store.create(name, rows=ROWS, dim=DIM, optimizer=em.optim.SGD(0.1)) for name in "ab"
    )
    first, second = em.torch.Embedding(one), em.torch.Embedding(two)
    optimizer = em.torch.Optimizer([{"params": first, "lr": 0.5}, {"params": [second]}], lr=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    (first(torch.tensor([1])).sum() + second(torch.tensor([1])).sum()).backward()
    optimizer.step()
    assert one.optimizer.lr == 0.5
    assert two.optimizer.lr == 0.25
    for entry, error, text in (
        ({"params": first, "learning_rate": 1.0}, ValueError, "learning_rate"),
        ({"params": first, "lr": -1.0}, ValueError, "lr"),
        ({"params": first, "lr": "1"}, TypeError, "lr"),
        ({"lr": 1.0}, ValueError, "params"),
        ({"params": [first.anchor]}, TypeError, "embermap.torch.Embedding"),
        ({"params": first.anchor}, TypeError, "embermap.torch.Embedding"),
        (torch.nn.Linear(1, 1), TypeError, "embermap.torch.Embedding"),
    ):
        with pytest.raises(error, match=text):
            em.torch.Optimizer([entry])
    collection = em.torch.EmbeddingCollection({"a": first, "b": second})
    more = em.torch.Embedding(one)
    model = torch.nn.ModuleDict({"rows": collection, "one": more, "top": torch.nn.Linear(1, 1)})
    with pytest.raises(TypeError, match=r"not ModuleDict; give those that are in it: rows, one$"):
        em.torch.Optimizer(model)
    with pytest.raises(TypeError, match=r"not Parameter: give the modules, not their parameters$"):
        em.torch.Optimizer(first.parameters())
    bag = em.torch.EmbeddingBag(one)
    with pytest.raises(ValueError, match="lr=0.7 and with lr=0.5"):
        em.torch.Optimizer([{"params": first, "lr": 0.7}, bag])


@pytest.mark.parametrize("later", [False, True], ids=["at once", "added"])
def test_groups_of_other_kinds_have_their_own_hyperparameters_alone(store, later):
    kinds = [em.optim.SGD(0.1, momentum=0.9), em.optim.Adagrad(0.2), em.optim.Adam(0.3)]
    modules = [
        em.torch.Embedding(store.create(f"t{n}", rows=ROWS, dim=DIM, optimizer=kind))
        for n, kind in enumerate(kinds)
    ]
    optimizer = em.torch.Optimizer(modules[0] if later else modules)
    for module in modules[1:] if later else []:
        optimizer.add_param_group({"params": module})
    inner = {"params", "table", "step"}
    for group, kind in zip(optimizer.param_groups, kinds, strict=True):
        names = {field.name for field in dataclasses.fields(kind)} - {"step"}
        assert set(group) - inner == names
    state = optimizer.state_dict()
    state["param_groups"][2]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.5]
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.load_state_dict(optimizer.state_dict())


def test_adding_groups(store):
    tables = [store.create(name, rows=ROWS, dim=DIM, optimizer=em.optim.SGD(0.1)) for name in "abc"]
    first, second, third = map(em.torch.Embedding, tables)
    optimizer = em.torch.Optimizer(first)
    optimizer.add_param_group({"params": second, "lr": 1.0})
    optimizer.add_param_group({"params": [third, em.torch.EmbeddingBag(tables[2])]})
    assert [group["table"] for group in optimizer.param_groups] == ["a", "b", "c"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0, 0.1]
    sum(module(torch.tensor([1])).sum() for module in (first, second, third)).backward()
    optimizer.step()
    assert [table.step for table in tables] == [1, 1, 1]
    assert tables[1][1].tolist() == [-1] * DIM
    optimizer.zero_grad()
    assert third.weight.grad is None
    with pytest.raises(ValueError, match="'b'"):
        optimizer.add_param_group({"params": em.torch.EmbeddingBag(tables[1])})
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(1))})
    assert len(optimizer.param_groups) == 3


def every_optimizer():
    """Names of what tables can be trained with."""
    return [name for name in em.optim.__all__ if dataclasses.is_dataclass(getattr(em.optim, name))]


@pytest.mark.parametrize("kind", every_optimizer())
def test_every_optimizer_of_tables(store, kind):
    table = store.create(
        "t", rows=ROWS, dim=DIM, optimizer=getattr(em.optim, kind)(lr=0.05), init=em.init.Normal()
    )
    ours = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(ours)
    pairs = [(ours, optimizer)]
    if hasattr(torch.optim, kind):  # torch has no row-wise Adagrad
        theirs = torch.nn.Embedding(ROWS, DIM, sparse=kind == "SparseAdam")
        theirs.weight.data.copy_(torch.from_numpy(table[:]))
        pairs.append((theirs, getattr(torch.optim, kind)(theirs.parameters(), lr=0.05)))
    for _ in range(4):
        for module, steps in pairs:
            steps.zero_grad()
            module(torch.arange(ROWS)).square().sum().backward()
            steps.step()
    if len(pairs) == 2:
        assert_same(table, theirs)
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["step"] == table.step == 4
    again = em.torch.Optimizer(em.torch.Embedding(table))
    again.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == table.optimizer.lr == 0.05


def test_a_state_of_before_some_options_gets_their_defaults(table):
    optimizer = em.torch.Optimizer(em.torch.Embedding(table))
    optimizer.param_groups[0]["lr"] = 0.25
    state = optimizer.state_dict()
    for name in ("maximize", "clip_value", "clip_row", "stochastic_rounding", "dampening"):
        del state["param_groups"][0][name]
    again = em.torch.Optimizer(em.torch.Embedding(table))
    again.load_state_dict(state)
    group = again.param_groups[0]
    assert (group["lr"], group["clip_row"], group["maximize"]) == (0.25, None, False)
    assert "clip_row" not in state["param_groups"][0]  # the caller's is left as it was


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda state: state["param_groups"].clear(), ValueError, "different number of parameter"),
        (lambda state: state["param_groups"][0].pop("table"), ValueError, "names no table"),
        (lambda state: state["param_groups"][0].update(table="u"), ValueError, "of table 'u'"),
        (lambda state: state["param_groups"][0].pop("momentum"), ValueError, "has no 'momentum'"),
        (lambda state: state["param_groups"][0].update(eps=1e-8), ValueError, "kind.*has 'eps'"),
        (lambda state: state["param_groups"][0].update(lr=-1.0), ValueError, "[Ll]earning rate"),
        (lambda state: state["param_groups"][0]["params"].append(7), ValueError, "size"),
        (lambda state: state.pop("param_groups"), KeyError, "param_groups"),
    ],
)
def test_states_that_cannot_be_are_refused(table, change, error, text):
    optimizer = em.torch.Optimizer(em.torch.Embedding(table))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["momentum"] = 0.5
    change(state)
    with pytest.raises(error, match=text):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["momentum"] == 0.8


def test_the_state_of_torchs_own_optimizer_is_refused(table):
    (_, optimizer), (_, others) = both(table)
    with pytest.raises(ValueError, match=r"not of embermap\.torch\.Optimizer"):
        optimizer.load_state_dict(others.state_dict())
    with pytest.raises(TypeError, match="must be a dict, not list"):
        optimizer.load_state_dict([])


def test_hooks_are_called(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(("before", table.step)))
    optimizer.register_step_post_hook(lambda *_: calls.append(("after", table.step)))
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("state"))
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.state_dict()
    assert calls == [("before", 0), ("after", 1), "state"]


def test_accumulated_gradients_are_one_step(table):
    (ours, optimizer), (theirs, others) = both(table)
    for module, steps in ((ours, optimizer), (theirs, others)):
        for _ in range(2):
            steps.zero_grad()
            for part in range(0, ROWS, 4):
                (module(torch.arange(part, part + 4)).square().sum() / 3).backward()
            steps.step()
    assert table.step == 2
    assert_same(table, theirs)


def test_copies_of_a_model_and_its_optimizer_belong_together(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding)
    other, steps = copy.deepcopy((embedding, optimizer))
    assert steps.param_groups[0]["params"][0] is other.anchor
    before = torch.from_numpy(table[:])
    other(torch.tensor([2])).sum().backward()
    optimizer.step()
    assert table.step == 0
    steps.step()
    assert (torch.from_numpy(table[:]) != before).any(1).nonzero().tolist() == [[2]]


def test_a_training_step_that_is_compiled_as_a_whole(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding)

    @torch.compile(backend="eager")
    def step(ids):
        optimizer.zero_grad()
        loss = embedding(ids).sum()
        loss.backward()
        optimizer.step()
        return loss

    for count in range(3):
        assert table.step == count
        step(torch.tensor([1, 2]))
    torch._dynamo.reset()


def test_swaps_have_their_own_optimizers(table):
    swap = em.torch.Swap(table, lambda params: torch.optim.SGD(params, lr=1.0))
    with pytest.raises(TypeError, match="own"):
        em.torch.Optimizer(swap)


def test_a_profiler_sees_the_step(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    embedding(torch.tensor([1])).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#Optimizer.step" in [event.key for event in profile.key_averages()]
    assert table.step == 1


def test_hooks_run_once_for_each_step_of_whatever_class(table):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    class Mine(em.torch.Optimizer):
        def step(self, closure=None):
            calls.append("mine")
            return super().step(closure)

    calls = []
    embedding = em.torch.Embedding(table)
    for kind in (em.torch.Optimizer, Mine, em.torch.Optimizer):
        optimizer = kind([embedding])
        everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
        before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        after = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        embedding(torch.tensor([1])).sum().backward()
        calls.clear()
        assert optimizer.step(lambda: calls.append("closure") or 2.5) == 2.5
        own = ["mine"] if kind is Mine else []
        assert calls == ["all", "before", *own, "closure", "after"]
        for handle in (everywhere, before, after):
            handle.remove()
        calls.clear()
        optimizer.step()
        assert calls == own
        optimizer.zero_grad()
    assert table.step == 6
