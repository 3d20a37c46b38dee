#!/usr/bin/env python3
"""Runs the benchmark suites and makes docs/benchmarks.md with its plots from their results.

    make benchmarks NAME="2 cores, virtual disk"
    python tools/bench/report.py run --name "2 cores, virtual disk" --size 8GiB --minutes 5
    python tools/bench/report.py run --name "2 cores, virtual disk" --only ngrams
    python tools/bench/report.py draw

`run` keeps what it measured in docs/benchmarks/NAME.json, one file a machine, and then draws;
`draw` makes page and plots from all files that are there. A suite that fails is reported, and what
an earlier run found stays. Needs matplotlib, which python/requirements-bench.txt has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("out_of_core", "bench", "ngrams", "durability", "convert", "gpu")
ORDER = [
    "np.memmap",
    "np.memmap, 16 threads",
    "torch.from_file",
    "h5py, contiguous",
    "h5py, chunked",
    "LMDB",
    "torch, in memory",
]
GPU_WAYS = [
    "embermap",
    "cudaMemcpy",
    "SpeedTorch's way",
    "torch, pinned",
    "torch, as people write it",
    "table in GPU memory",
]
TRAINING = {"lit2vec2": "Lit2Vec2", "research2vec2": "Research2Vec2"}  # shapes of gpu.py
GIB = 1 << 30


class ReportError(Exception):
    """A cause the user can act on; shown as one line."""


# --- running --------------------------------------------------------------------------------------


def file_of(folder: Path, name: str) -> Path:
    """Where the results of a machine are kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not slug:
        raise ReportError(f"--name {name!r} has neither letters nor digits")
    return folder / "benchmarks" / f"{slug}.json"


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results, whole or not at all: one measurement a line, numbers with six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_short(results), indent=1)
    # Lists of numbers stay on one line.
    text = re.sub(r"\[[-0-9.e+,\s]+\]", lambda m: " ".join(m[0].split()), text)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def run_suite(suite: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """Run one suite in a process of its own. Returns its results, and whether all went well."""
    out = folder / f"{suite}.json"
    command: list[str]
    if suite == "out_of_core":
        command = [sys.executable, str(ROOT / "tools/bench/out_of_core.py"), "--json", str(out)]
        for option in ("size", "memory", "seconds", "rounds", "threads"):
            value = getattr(args, option)
            command += [f"--{option}", str(value)] if value is not None else []
        for option in ("cases", "rivals"):
            for value in getattr(args, option) or []:
                command += [f"--{option}", value]
        command += ["--folder", str(args.folder)] + (["--quick"] if args.quick else [])
    elif suite == "bench":
        program = find_program()
        size = ["--size", "8MiB", "--memory", "4MiB", "--seconds", "0.05", "--batch", "1000"]
        if not args.quick:
            table = args.size or "8GiB"
            size = ["--size", table, "--memory", str(max(parse_size(table) // 10, 1 << 20))]
        command = [program, "bench", str(args.folder), "--json", "--optimizer", "adagrad", *size]
    elif suite == "durability":
        command = [sys.executable, str(ROOT / "tools/bench/durability.py"), "--json", str(out)]
        command += ["--folder", str(args.folder)] + (["--quick"] if args.quick else [])
    elif suite == "convert":
        command = [sys.executable, str(ROOT / "tools/bench/convert.py"), "--json", str(out)]
        command += ["--folder", str(args.folder), "--embermap", find_program()]
        command += ["--quick"] if args.quick else ["--size", args.size or "1GiB"]
        command += ["--rounds", str(args.rounds)] if args.rounds is not None else []
        command += ["--large"] if args.large else []
    elif suite == "gpu":
        command = [sys.executable, str(ROOT / "tools/bench/gpu.py"), "--json", str(out)]
        for option in ("suite", "cases"):
            for value in getattr(args, f"gpu_{option}") or []:
                command += [f"--{option}", value]
        command += ["--pools", args.gpu_pools] if args.gpu_pools is not None else []
        command += ["--folder", str(args.folder)] + (["--quick"] if args.quick else [])
    else:
        script = ROOT / "python/examples/billion_ngrams.py"
        command = [sys.executable, str(script), "--json", str(out), "--overwrite"]
        command += ["--store", str(args.folder / "embermap-ngrams"), "--minutes", f"{args.minutes}"]
        command += ["--disk", args.disk]
        if args.quick:
            command += ["--rows", "1e7", "--memory", "16MiB", "--batch", "3000"]
        if args.text is not None:
            command += ["--text", str(args.text)]
    print(f"== {suite}", flush=True)
    capture = suite == "bench"
    done = subprocess.run(
        command, stdout=subprocess.PIPE if capture else None, text=True, check=False
    )
    # Memory above its limit, or a part that failed: what was measured counts, and is shown.
    if done.returncode != 0 and (capture or not out.exists()):
        raise ReportError(f"{suite} ended with exit status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout if capture else out.read_text(encoding="utf-8"))
    if done.returncode != 0:
        print(f"report.py: warning: {suite} ended with exit status {done.returncode}", flush=True)
    if capture:
        print(json.dumps(found["bare"], indent=1))
    return found, done.returncode == 0


def no_gpu() -> str:
    """Why there is no CUDA device for the suite "gpu"; empty if there is one."""
    code = "import embermap as em; print('' if em.cuda_devices() else em.cuda_absence())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else ""


def find_program() -> str:
    """The `embermap` command line."""
    beside = Path(sys.executable).parent / "embermap"
    found = os.environ.get("EMBERMAP_CLI") or (
        str(beside) if beside.exists() else shutil.which("embermap")
    )
    if found is None:
        raise ReportError("no `embermap` program: `make build`, or EMBERMAP_CLI=PROGRAM")
    return found


def parse_size(text: str) -> int:
    """Bytes of "8GiB"."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ReportError(f"not a size such as 8GiB: {text!r}")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


def run(args: argparse.Namespace) -> int:
    """Run suites, keep their results, draw. Returns 1 if something failed."""
    path = file_of(args.out, args.name)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results["name"] = args.name
    failed = False
    with tempfile.TemporaryDirectory(prefix="embermap-report-") as folder:
        for suite in args.only or SUITES:
            absent = no_gpu() if suite == "gpu" and not args.only else ""
            if absent:
                print(f"report.py: note: gpu left out: {absent}", flush=True)
                continue
            try:
                results[suite], well = run_suite(suite, args, Path(folder))
            except (ReportError, OSError, ValueError) as error:
                print(f"report.py: error: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            failed |= not well
            save(path, results)
    if path.exists():
        draw(args.out)
    return 1 if failed else 0


# --- reading --------------------------------------------------------------------------------------


def load(folder: Path) -> list[dict[str, Any]]:
    """The results of all machines, by name."""
    files = sorted((folder / "benchmarks").glob("*.json"))
    return sorted(
        (json.loads(f.read_text(encoding="utf-8")) for f in files), key=lambda r: r["name"]
    )


def entries(
    machine: dict[str, Any], pattern: str, store: str | None = None
) -> list[dict[str, Any]]:
    """Measurements whose case matches a regular expression as a whole."""
    cases = machine.get("out_of_core", {}).get("cases", [])
    return [
        entry
        for entry in cases
        if "value" in entry
        and re.fullmatch(pattern, entry["case"])
        and (store is None or entry["store"] == store)
    ]


def own(machine: dict[str, Any], case: str, field: str = "value") -> float | None:
    """embermap's figure in a case: the median over the contests it took part in."""
    values = [e[field] for e in entries(machine, re.escape(case), "embermap") if field in e]
    return statistics.median(values) if values else None


def cases_of(machines: list[dict[str, Any]]) -> list[str]:
    """All cases, in the order in which they ran."""
    found: dict[str, None] = {}
    for machine in machines:
        for entry in machine.get("out_of_core", {}).get("cases", []):
            if entry["case"] != "start":
                found.setdefault(entry["case"])
    return list(found)


def durability_cases(machine: dict[str, Any], begin: str) -> list[dict[str, Any]]:
    """Measurements of the suite "durability" whose names begin so."""
    cases = machine.get("durability", {}).get("cases", [])
    return [case for case in cases if case["case"].startswith(begin)]


def goals(machine: dict[str, Any]) -> list[tuple[str, str, float | None, str, bool | None]]:
    """What embermap is meant to reach: (work, goal, figure, figure as text, reached)."""

    def ratios(pattern: str, store: str) -> list[float]:
        return [e["embermap_ratio"] for e in entries(machine, pattern, store)]

    def shares(pattern: str) -> list[float]:
        return [e["bare_ratio"] for e in entries(machine, pattern) if "bare_ratio" in e]

    def worst(values: list[float]) -> float | None:
        return min(values) if values else None

    def middle(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    memmap, torch = "np.memmap", "torch, in memory"
    tenth = "Zipf(1.05), a tenth of the table in memory"
    rows: list[tuple[str, float | None, float]] = [  # what of, its figure, at least
        (
            "uniform ids, cold: pages/s of a bare io_uring loop at depth 128, same file",
            middle(shares("dim128/weights/gather/uniform/cold")),
            0.9,
        ),
        (
            "uniform ids, cold: np.memmap (lowest of all tables)",
            worst(ratios("dim.*/gather/uniform/cold", memmap)),
            1,
        ),
        *(
            (
                f"{tenth}: {op}, np.memmap (lowest)",
                worst(ratios(f"dim.*/{op}/zipf:1.05/warm", memmap)),
                3,
            )
            for op in ("gather", "update")
        ),
        *(
            (f"all hot: {op}, {rival} (lowest)", worst(ratios(f"dim.*/{op}/.*/hot", torch)), 1)
            for op, rival in (
                ("gather", "torch.index_select"),
                ("update", "torch's sparse step"),
            )
        ),
        ("scan: dd with direct I/O", middle(shares("dim.*/scan/.*")), 0.9),
        ("bulk scatter: dd with direct I/O", middle(shares("dim.*/bulk/.*")), 0.9),
        (
            "a loop that computes as long as it reads, prefetching: computing alone",
            middle([e["value"] for e in entries(machine, ".*/prefetch/.*")]),
            0.9,
        ),
    ]
    found: list[tuple[str, str, float | None, str, bool | None]] = []
    for work, value, least in rows:
        text = "not measured" if value is None else f"{value:.2f}"
        reached = None if value is None else value >= least
        found.append((work, f"at least {least:g}", value, text, reached))
    for case in durability_cases(machine, "train/"):
        ids = (
            case["case"]
            .partition("/")[2]
            .replace("zipf:1.05", "Zipf(1.05)")
            .replace("uniform", "uniform ids")
        )
        found.append(
            (
                f"a loop that commits, {ids}: the same loop with durability none",
                "at least 0.8",
                case["ratio"],
                f"{case['ratio']:.2f}",
                case["ratio"] >= 0.8,
            )
        )
    found += convert_goals(machine)
    found += gpu_goals(machine)
    run = machine.get("ngrams")
    if run is not None:
        above = (run["peak_resident"] - run["without_store"] - run["budget"]) / 2**20
        found.append(
            (
                f"{run['rows']:,} rows: peak resident memory above process and budget",
                "at most 64 MiB",
                above,
                f"{above:.0f} MiB",
                above <= 64,
            )
        )
        cached = run["page_cache_of_table"] / 2**20
        found.append(
            (
                f"{run['rows']:,} rows: page cache of the table's file afterwards",
                "at most 64 MiB",
                cached,
                f"{cached:.1f} MiB",
                cached <= 64,
            )
        )
    return found


def convert_goals(
    machine: dict[str, Any],
) -> list[tuple[str, str, float | None, str, bool | None]]:
    """What files turned into one another are meant to reach, as `goals` has it."""
    cases = machine.get("convert", {}).get("cases", [])
    if not cases:
        return []

    def lowest(pattern: str, key: str) -> tuple[float, str] | None:
        return min(
            (
                (case[key], case["case"])
                for case in cases
                if key in case and re.fullmatch(pattern, case["case"])
            ),
            default=None,
        )

    disk = "npy to (npy|hdf5|safetensors|torch)|(hdf5|hdf5, chunked,|safetensors|torch) to npy"
    text = "word2vec text to npy|npy to word2vec text"
    rows = [
        ("npy, HDF5, safetensors, torch, read and written: cp", disk, "cp_ratio", 0.9),
        ("files into files: the format's own library", ".*", "other_ratio", 1),
        ("gzip HDF5, read and written: h5py", ".*hdf5, gzip.*", "other_ratio", 1.5),
        ("word2vec text, read and written: gensim", text, "other_ratio", 5),
    ]
    found: list[tuple[str, str, float | None, str, bool | None]] = []
    for work, pattern, key, least in rows:
        worst = lowest(pattern, key)
        if worst is None:
            found.append((f"{work} (lowest)", f"at least {least:g}", None, "not measured", None))
            continue
        figure = f"{worst[0]:.2f} ({worst[1]})"
        found.append(
            (f"{work} (lowest)", f"at least {least:g}", worst[0], figure, worst[0] >= least)
        )
    most = max((case["peak_resident"] / 2**20, case["case"]) for case in cases)
    found.append(
        (
            "files into files: resident memory (highest)",
            "at most 256 MiB",
            most[0],
            f"{most[0]:.0f} MiB ({most[1]})",
            most[0] <= 256,
        )
    )
    return found


def gpu_entries(machine: dict[str, Any], op: str, **wanted: Any) -> list[dict[str, Any]]:
    """Measurements of the suite "gpu" with these values; threads as many as it used at most."""
    suite = machine.get("gpu", {})
    wanted.setdefault("threads", suite.get("settings", {}).get("threads"))
    return [
        entry
        for entry in suite.get("cases", [])
        if "error" not in entry
        and re.fullmatch(op, entry["op"])
        and all(value is None or entry[key] == value for key, value in wanted.items())
    ]


def gpu_goals(machine: dict[str, Any]) -> list[tuple[str, str, float | None, str, bool | None]]:
    """What rows to and from the GPU are meant to reach, as `goals` has it."""
    if "gpu" not in machine:
        return []

    def link(op: str, **wanted: Any) -> float | None:
        """The lowest share of the link's rate."""
        found = gpu_entries(machine, op, way="embermap", order="uniform", **wanted)
        shares = [entry["limit_ratio"] for entry in found if "limit_ratio" in entry]
        return min(shares) if shares else None

    def beside(pool: int, *ways: str) -> float | None:
        """The lowest ratio to these ways, both directions."""
        found = gpu_entries(
            machine, "to|from", ids=131_072, order="uniform", row_bytes=512, pool_bytes=pool
        )
        ratios = [e["embermap_ratio"] for e in found if e["way"] in ways and "embermap_ratio" in e]
        return min(ratios) if ratios else None

    def link_of_pools(op: str) -> float | None:
        shares = [
            link(op, ids=131_072, row_bytes=512, pool_bytes=size * GIB) for size in (1, 8, 24, 48)
        ]
        return min((share for share in shares if share is not None), default=None)

    wide = [
        link("to|from", ids=131_072, row_bytes=size)
        for size in sorted({e["row_bytes"] for e in machine["gpu"]["cases"]})
        if size >= 1_600
    ]
    fixed = gpu_entries(machine, "to|from", way="embermap", ids=1_024, row_bytes=512)
    slow = [entry["slowdown"] for entry in gpu_entries(machine, "beside-.*")]

    def training(shape: str) -> float | None:
        for e in gpu_entries(machine, "training", way="SpeedTorch's way"):
            if e["case"].startswith(f"training/{shape}/") and "embermap_ratio" in e:
                ratio: float = e["embermap_ratio"]
                return ratio
        return None

    loops = [entry["compute_ratio"] for entry in gpu_entries(machine, "overlap")]
    speedtorch, pinned = "SpeedTorch's way", "torch, pinned"
    rows: list[tuple[str, float | None, float]] = [
        *(
            (
                f"131,072 ids of 512 B {where} the GPU, 1 to 48 GiB: cudaMemcpy (lowest)",
                link_of_pools(op),
                0.8,
            )
            for op, where in (("to", "to"), ("from", "from"))
        ),
        (
            "1 M ids of 512 B, both ways: cudaMemcpy (lowest)",
            link("to|from", ids=1_048_576, row_bytes=512),
            0.85,
        ),
        (
            "131,072 ids, rows of 1,600 B and more, both ways: cudaMemcpy (lowest)",
            min((share for share in wide if share is not None), default=None),
            0.88,
        ),
        (
            "131,072 ids of 512 B, 0.5 GiB, both ways: SpeedTorch's way (lowest)",
            beside(GIB // 2, speedtorch),
            1,
        ),
        (
            "131,072 ids of 512 B, 8 GiB, both ways: SpeedTorch's way and torch (lowest)",
            beside(8 * GIB, speedtorch, pinned),
            2.5,
        ),
        *(
            (f"training step of {name}'s shape: SpeedTorch's way", training(shape), 1.7)
            for shape, name in TRAINING.items()
        ),
        (
            "a loop that computes longer than rows take to and fro: computing alone",
            loops[0] if loops else None,
            0.95,
        ),
    ]
    found: list[tuple[str, str, float | None, str, bool | None]] = []
    for work, value, least in rows:
        text = "not measured" if value is None else f"{value:.2f}"
        reached = None if value is None else value >= least
        found.append((work, f"at least {least:g}", value, text, reached))
    longest = max((entry["seconds"] for entry in fixed), default=None)
    found.append(
        (
            "1,024 ids of 512 B, both ways (longest)",
            "at most 100 us",
            longest,
            "not measured" if longest is None else f"{longest * 1e6:.0f} us",
            None if longest is None else longest <= 100e-6,
        )
    )
    worst = max(slow, default=None)
    found.append(
        (
            "a matrix product beside rows to and fro: how much longer it takes",
            "at most 5 %",
            worst,
            "not measured" if worst is None else f"{worst:.1%}",
            None if worst is None else worst <= 0.05,
        )
    )
    return found


# --- plots ----------------------------------------------------------------------------------------


def save_plot(figure: Any, path: Path) -> None:
    """Write a figure; the file says nothing of when and with what it was made."""
    figure.savefig(path, dpi=100, metadata={"Software": None})
    from matplotlib import pyplot

    pyplot.close(figure)


def title_of(case: str) -> str:
    """A case as people say it."""
    dim, kind, op, ids, temperature = case.split("/")
    ids = {"uniform": "uniform", "rows": ""}.get(ids, ids.replace("zipf:", "Zipf "))
    trained = "Adagrad" if kind == "adagrad" else "weights"
    return " ".join(f"{op} {ids} {temperature}, {dim.replace('dim', 'dim ')} {trained}".split())


def plot_ratios(machines: list[dict[str, Any]], path: Path) -> bool:
    """Draw embermap against each store in each case, one column a machine.

    This and the others return False, and draw nothing, where there is nothing to draw.
    """
    from matplotlib import pyplot

    cases = [
        case
        for case in cases_of(machines)
        if any("embermap_ratio" in e for m in machines for e in entries(m, re.escape(case)))
    ]
    if not cases:
        return False
    figure, all_axes = pyplot.subplots(
        1,
        len(machines),
        figsize=(4.2 + 3.6 * len(machines), 1.6 + 0.24 * len(cases)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    colors = pyplot.get_cmap("tab10")
    markers = "osD^v*P"
    for axes, machine in zip(all_axes[0], machines, strict=True):
        for number, store in enumerate(ORDER):
            points = [
                (e["embermap_ratio"], cases.index(e["case"]))
                for e in entries(machine, ".*", store)
                if e["case"] in cases
            ]
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(
                    x, y, markers[number], color=colors(number), label=store, alpha=0.85, ms=6
                )
        axes.axvline(1, color="0.3", lw=1)
        axes.set_xscale("log")
        axes.grid(axis="both", color="0.9")
        axes.set_title(machine["name"], fontsize=10)
        axes.set_xlabel("embermap's rate / the other's (right of the line: faster)", fontsize=8)
    all_axes[0][0].set_yticks(range(len(cases)), [title_of(case) for case in cases], fontsize=8)
    all_axes[0][0].invert_yaxis()
    seen: dict[str, Any] = {}
    for axes in all_axes[0]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    figure.legend(
        seen.values(), seen.keys(), loc="outside lower center", ncol=4, fontsize=8, frameon=False
    )
    save_plot(figure, path)
    return True


THROUGHPUT = (
    "dim128/weights/gather/uniform/cold",
    "dim128/weights/gather/zipf:1.05/warm",
    "dim128/adagrad/update/zipf:1.05/warm",
    "dim32/adagrad/update/zipf:1.05/warm",
)


def plot_throughput(machines: list[dict[str, Any]], path: Path) -> bool:
    """Rows a second of every store in the cases that matter most."""
    from matplotlib import pyplot

    cases = [c for c in THROUGHPUT if any(own(m, c) is not None for m in machines)]
    cases = cases or [c for c in cases_of(machines) if c.split("/")[2] != "prefetch"][:4]
    if not cases:
        return False
    figure, all_axes = pyplot.subplots(
        len(machines),
        len(cases),
        figsize=(3.1 * len(cases) + 1, 2.4 * len(machines) + 0.3),
        squeeze=False,
        layout="constrained",
    )
    for row, machine in zip(all_axes, machines, strict=True):
        for axes, case in zip(row, cases, strict=True):
            bars = [("embermap", own(machine, case))]
            for store in ORDER:
                values = [e["value"] for e in entries(machine, re.escape(case), store)]
                if values:
                    bars.append((store, statistics.median(values)))
            names = [name for name, value in bars if value is not None]
            values = [value / 1e3 for _, value in bars if value is not None]
            tints = ["tab:orange" if name == "embermap" else "tab:blue" for name in names]
            axes.barh(range(len(names)), values, color=tints)
            axes.set_yticks(range(len(names)), names, fontsize=7)
            axes.invert_yaxis()
            axes.tick_params(axis="x", labelsize=7)
            axes.set_title(f"{title_of(case)}\n{machine['name']}", fontsize=7)
            axes.set_xlabel("thousand rows/s", fontsize=7)
            if not names:
                axes.set_axis_off()
                axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes, size=8)
    save_plot(figure, path)
    return True


def plot_memory(machines: list[dict[str, Any]], path: Path) -> bool:
    """Resident memory of the n-gram runs over time."""
    from matplotlib import pyplot

    runs = [m for m in machines if "ngrams" in m]
    if not runs:
        return False
    figure, all_axes = pyplot.subplots(
        len(runs), 1, figsize=(8, 2.9 * len(runs)), squeeze=False, layout="constrained"
    )
    for axes, machine in zip(all_axes[:, 0], runs, strict=True):
        run, samples = machine["ngrams"], machine["ngrams"]["samples"]
        minutes = [s / 60 for s in samples["seconds"]]
        axes.plot(minutes, [x / 2**20 for x in samples["resident"]], label="resident")
        axes.plot(minutes, [x / 2**20 for x in samples["anonymous"]], label="of it anonymous")
        limit = run["limit"] / 2**20
        axes.axhline(limit, color="0.4", ls="--", label="process + budget + 64 MiB")
        axes.axhline(run["without_store"] / 2**20, color="0.6", ls=":", label="process alone")
        axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, 1.15 * limit))
        axes.set_title(
            f"{run['rows']:,} x {run['dim']} float32 with Adagrad, budget "
            f"{run['budget'] / 2**20:.0f} MiB: {machine['name']}",
            fontsize=9,
        )
        axes.legend(loc="lower right", fontsize=8)
    save_plot(figure, path)
    return True


def plot_gpu(machines: list[dict[str, Any]], path: Path) -> bool:
    """GB/s of distinct rows against pool, ids, row and threads, to and from the GPU."""
    from matplotlib import pyplot

    axes_of = (
        ("pool_bytes", "pool, GiB", GIB),
        ("ids", "ids, thousand", 1e3),
        ("row_bytes", "row, bytes", 1),
        ("threads", "threads", 1),
    )
    kept = [m for m in machines if gpu_entries(m, "to|from")]
    if not kept:
        return False
    figure, all_axes = pyplot.subplots(
        2 * len(kept),
        len(axes_of),
        figsize=(3.1 * len(axes_of) + 0.6, 4.6 * len(kept) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    colors = pyplot.get_cmap("tab10")
    for number, machine in enumerate(kept):
        common = gpu_main(machine)
        for row, op in enumerate(("to", "from")):
            for axes, (key, label, scale) in zip(all_axes[2 * number + row], axes_of, strict=True):
                wanted = {**common, key: None}
                top = 0.0
                for tint, way in enumerate(GPU_WAYS[:-1]):
                    found = gpu_entries(machine, op, way=way, **wanted)
                    points = sorted((e[key] / scale, e["bytes_per_second"] / 1e9) for e in found)
                    if points:
                        x, y = zip(*points, strict=True)
                        top = max(top, *y)
                        style = "--" if way == "cudaMemcpy" else "o-"
                        tone = "0.4" if way == "cudaMemcpy" else colors(tint)
                        axes.plot(x, y, style, color=tone, label=way, ms=4)
                axes.set_xscale("log")
                ticks = sorted({e[key] / scale for e in gpu_entries(machine, op, **wanted)})
                axes.set_xticks(ticks, [f"{tick:,.4g}" for tick in ticks])
                axes.minorticks_off()
                axes.set_ylim(0, 1.08 * top or 1)
                axes.tick_params(labelsize=7)
                axes.grid(color="0.9")
                axes.set_xlabel(label, fontsize=8)
                axes.set_title(f"{op} the GPU: {machine['name']}", fontsize=7)
            all_axes[2 * number + row][0].set_ylabel("GB/s of distinct rows", fontsize=8)
    seen: dict[str, Any] = {}
    for axes in all_axes.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    figure.legend(
        seen.values(), seen.keys(), loc="outside lower center", ncol=5, fontsize=8, frameon=False
    )
    save_plot(figure, path)
    return True


def gpu_main(machine: dict[str, Any]) -> dict[str, Any]:
    """The values of cases that are about something else: 131,072 uniform ids of 512 B, 8 GiB."""
    found = gpu_entries(machine, "to|from", order="uniform")

    def nearest(key: str, value: int) -> int:
        return min({e[key] for e in found} or {value}, key=lambda v: (abs(v - value), v))

    return {
        "order": "uniform",
        "ids": nearest("ids", 131_072),
        "row_bytes": nearest("row_bytes", 512),
        "pool_bytes": nearest("pool_bytes", 8 * GIB),
        "threads": machine["gpu"]["settings"]["threads"],
    }


# --- the page -------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def machines_table(machines: list[dict[str, Any]]) -> str:
    """What ran it."""
    rows: list[tuple[str, list[str]]] = []

    def add(label: str, text: Any) -> None:
        cells = []
        for machine in machines:
            try:
                cells.append(str(text(machine)))
            except (KeyError, TypeError):
                cells.append("")
        if any(cells):
            rows.append((label, cells))

    def host(m: dict[str, Any]) -> Any:
        return m["out_of_core" if "out_of_core" in m else "gpu"]["machine"]

    add("cores", lambda m: host(m)["cores"])
    add("processor", lambda m: host(m)["cpu"])
    add("memory", lambda m: f"{host(m)['memory'] / 2**30:.0f} GiB")
    add("kernel, file system", lambda m: f"{host(m)['kernel']}, {host(m)['file_system']}")
    add(
        "GPU",
        lambda m: ", ".join(
            [
                m["gpu"]["machine"]["gpu"]["name"],
                f"{m['gpu']['machine']['gpu']['memory'] / 2**30:.0f} GiB",
                f"driver {m['gpu']['machine']['gpu']['driver'] or '?'}",
                f"CUDA {m['gpu']['machine']['gpu']['cuda']}",
            ]
        ),
    )
    add(
        "disk: random 4 KiB reads, depth 128",
        lambda m: f"{m['bench']['bare']['random_read']['per_second']:,.0f} a second",
    )
    for key, label in (("sequential_read", "read"), ("sequential_write", "write")):
        add(
            f"disk: {label} in order",
            lambda m, key=key: f"{m['bench']['bare'][key]['bytes_per_second'] / 1e6:,.0f} MB/s",
        )
    add("table", lambda m: f"{m['out_of_core']['settings']['size'] / 2**30:.3g} GiB")
    add("memory of each process", lambda m: mib(m["out_of_core"]["confinement"]["memory"]))
    add("embermap's budget in it", lambda m: mib(m["out_of_core"]["embermap_budget"]))
    add("confined by", lambda m: m["out_of_core"]["confinement"]["text"])
    add("threads", lambda m: m["out_of_core"]["settings"]["threads"])
    add(
        "versions",
        lambda m: ", ".join(
            f"{k} {v}"
            for k, v in {
                **m.get("out_of_core", {}).get("machine", {}).get("versions", {}),
                **m.get("gpu", {}).get("machine", {}).get("versions", {}),
            }.items()
        ),
    )
    add(
        "a try, not a result",
        lambda m: (
            "tiny tables"
            if any(m[s]["settings"]["quick"] for s in ("out_of_core", "gpu") if s in m)
            else ""
        ),
    )
    return table(["", *(m["name"] for m in machines)], [[label, *cells] for label, cells in rows])


def mib(n: float) -> str:
    """Bytes in MiB."""
    return f"{n / 2**20:,.0f} MiB"


def goals_table(machines: list[dict[str, Any]]) -> str:
    """Goals and what was reached."""
    found: dict[str, tuple[str, list[str]]] = {}
    for number, machine in enumerate(machines):
        for work, goal, _, text, reached in goals(machine):
            cells = found.setdefault(work, (goal, ["not measured"] * len(machines)))[1]
            cells[number] = text if reached is None else f"{text}{'' if reached else ' (missed)'}"
    return table(
        ["against", "goal", *(m["name"] for m in machines)],
        [[work, goal, *cells] for work, (goal, cells) in found.items()],
    )


def results_tables(machine: dict[str, Any]) -> str:
    """All figures of a machine."""
    out = []
    cases = cases_of([machine])
    for op in ("rows/s", "bytes/s"):
        mine = [c for c in cases if any(e["unit"] == op for e in entries(machine, re.escape(c)))]
        stores = [
            store
            for store in ORDER
            if any(entries(machine, re.escape(case), store) for case in mine)
        ]
        if not mine:
            continue
        scale, unit = (1e3, "thousand rows/s") if op == "rows/s" else (1e6, "MB/s")
        rows = []
        for case in mine:
            value = own(machine, case)
            cells = ["" if value is None else f"{value / scale:,.0f}"]
            extra = own(machine, case, "bare_ratio")
            rate = own(machine, case, "hit_rate")
            for store in stores:
                found = entries(machine, re.escape(case), store)
                if not found:
                    cells.append("")
                    continue
                other = statistics.median(e["value"] for e in found) / scale
                shown = f"{other:,.0f}" if other >= 10 else f"{other:.1f}"
                cells.append(f"{shown} (**{found[-1]['embermap_ratio']:.2f}**)")
            note = "" if extra is None else f"{extra:.2f} of the bare disk"
            if rate is not None and not case.endswith("/hot"):
                note = "; ".join(filter(None, [note, f"{rate:.0%} of pages in memory"]))
            rows.append([title_of(case), *cells, note])
        out.append(
            f"In {unit}; in brackets embermap's rate divided by that store's.\n\n"
            + table(["case", "embermap", *stores, "embermap"], rows)
        )
    return "\n".join(out)


def trouble(machine: dict[str, Any]) -> str:
    """What failed, and notes of the run."""
    suite = machine.get("out_of_core", {})
    lines = [f"- {note}" for note in suite.get("notes", [])]
    lines += [
        f"- {e['store']}, {e['case']}: {e['error']}" for e in suite.get("cases", []) if "error" in e
    ]
    return "\n".join(lines) + "\n" if lines else ""


def ngrams_text(machines: list[dict[str, Any]]) -> str:
    """The runs on real ids."""
    rows = []
    runs = [m for m in machines if "ngrams" in m]
    if not runs:
        return ""
    facts: list[tuple[str, Any]] = [
        ("rows x dim", lambda r: f"{r['rows']:,} x {r['dim']}"),
        ("apparent size", lambda r: f"{r['apparent_bytes'] / 1e9:,.0f} GB"),
        ("on disk at the end", lambda r: f"{r['disk_bytes'] / 1e9:.1f} GB"),
        ("created in", lambda r: f"{r['create_seconds']:.2f} s"),
        ("steps of rows", lambda r: f"{r['steps']:,} of {r['batch']:,}"),
        ("time, passes", lambda r: f"{r['seconds']:.0f} s, {r['passes']:.2f}"),
        ("rows gathered and updated", lambda r: f"{r['rows_per_second'] / 1e3:,.0f} thousand/s"),
        ("loss, first and last steps", lambda r: f"{r['loss_first']:.3f}, {r['loss_last']:.3f}"),
        ("pages found in memory", lambda r: f"{r['hit_rate']:.1%}"),
        (
            "read, written",
            lambda r: f"{r['bytes_read'] / 1e9:.1f} GB, {r['bytes_written'] / 1e9:.1f} GB",
        ),
        ("budget", lambda r: mib(r["budget"])),
        ("process without the store", lambda r: mib(r["without_store"])),
        ("peak resident", lambda r: mib(r["peak_resident"])),
        ("page cache of the table's file", lambda r: mib(r["page_cache_of_table"])),
    ]
    for label, text in facts:
        rows.append([label, *(text(m["ngrams"]) for m in runs)])
    notes = [f"- {m['name']}: {note}" for m in runs for note in m["ngrams"].get("notes", [])]
    return (
        table(["", *(m["name"] for m in runs)], rows)
        + "\n![Resident memory over time](benchmarks/memory.png)\n"
        + ("\n" + "\n".join(notes) + "\n" if notes else "")
    )


def bench_text(machines: list[dict[str, Any]]) -> str:
    """What `embermap bench` says."""
    runs = [m for m in machines if "bench" in m]
    if not runs:
        return ""
    rows = []
    facts: list[tuple[str, Any]] = [
        (
            "table",
            lambda b: (
                f"{b['table']['written_rows']:,} x {b['table']['dim']} {b['table']['dtype']}, "
                f"{b['settings']['ids']}"
            ),
        ),
        (
            "page I/O",
            lambda b: (
                f"{b['page_io']['engine']}, "
                f"{'direct' if b['page_io']['direct_reads'] else 'buffered'}"
            ),
        ),
        ("gather, cold", lambda b: f"{b['gather_cold']['rows_per_second']:,.0f} rows/s"),
        ("of the bare disk", lambda b: f"{b['gather_cold']['share_of_bare']:.2f}"),
        ("gather, warm", lambda b: f"{b['gather_warm']['rows_per_second']:,.0f} rows/s"),
        ("update", lambda b: f"{b['update']['rows_per_second']:,.0f} rows/s"),
        ("scan, of the bare disk", lambda b: f"{b['scan']['share_of_bare']:.2f}"),
        ("bulk write, of the bare disk", lambda b: f"{b['bulk_write']['share_of_bare']:.2f}"),
        ("prefetch, of computing alone", lambda b: f"{b['prefetch']['share_of_compute']:.2f}"),
        (
            "peak resident, budget",
            lambda b: f"{mib(b['memory']['peak_resident'])}, {mib(b['memory']['budget'])}",
        ),
    ]
    for label, text in facts:
        rows.append([label, *(text(m["bench"]) for m in runs)])
    return "## `embermap bench`\n\n" + table(["", *(m["name"] for m in runs)], rows)


def durability_text(machines: list[dict[str, Any]]) -> str:
    """Commits, recovery, verification."""
    out = []
    for machine in machines:
        if "durability" not in machine:
            continue
        settings, rows = machine["durability"]["settings"], []
        times = settings.get("commits", 1)
        loop = f"{times} times " if times > 1 else ""
        for case in durability_cases(machine, "train/"):
            rows.append(
                [
                    f"training, {case['case'].partition('/')[2]}: {loop}{settings['every']:,} "
                    f"batches of {settings['batch']:,} ids and a commit, table of "
                    f"{mib(4 * settings['memory'])} in {mib(settings['memory'])}",
                    f"{case['seconds']:.1f} s",
                    f"{case['ratio']:.2f} of the rate with durability none "
                    f"({case['before_checkpoint']:.2f} until its last commit)",
                ]
            )
        for case in durability_cases(machine, "commit/"):
            rows.append(
                [
                    f"commit of {case['dirty_bytes'] >> 10:,} KiB in a table of "
                    f"{mib(case['table_bytes'])}",
                    f"{case['seconds'] * 1e3:.1f} ms",
                    f"{case['bare_seconds'] * 1e3:.1f} ms: direct writes of as many bytes, synced",
                ]
            )
        for case in durability_cases(machine, "recovery"):
            rows.append(
                [
                    f"opening after a crash, {mib(case['log_bytes'])} in the log",
                    f"{case['seconds']:.2f} s",
                    f"{case['bare_seconds']:.2f} s: the log read in order, as many pages written",
                ]
            )
        for case in durability_cases(machine, "verify"):
            ratio = case["ratio"]
            rows.append(
                [
                    f"verify, {mib(case['bytes'])}",
                    f"{case['bytes_per_second'] / 1e6:,.0f} MB/s",
                    "" if ratio is None else f"{ratio:.2f} of dd with direct I/O",
                ]
            )
        load = machine["durability"]["load"]
        out.append(
            f"**{machine['name']}** (load {load:.1f} at the beginning)\n\n"
            + table(["", "embermap", "beside it"], rows)
        )
    return "## Durability\n\n" + "\n".join(out) if out else ""


def convert_text(machines: list[dict[str, Any]]) -> str:
    """Files turned into one another."""
    out = []
    for machine in machines:
        if "convert" not in machine:
            continue
        found, rows = machine["convert"], []
        for case in found["cases"]:
            other = ""
            if "other_ratio" in case:
                other = (
                    f"{case['other_ratio']:.2f} of {case['beside']} "
                    f"(CPU {case['other_cpu_ratio']:.2f}, {mib(case['other_peak_resident'])})"
                )
            elif "error" in case:
                other = f"{case['beside']}: {case['error']}"
            rows.append(
                [
                    case["case"],
                    mib(case["bytes"]),
                    f"{case['bytes_per_second'] / 1e6:,.0f} MB/s",
                    f"{case['cpu_seconds_per_gb']:.2f}",
                    f"{case['cp_ratio']:.2f}" if "cp_ratio" in case else "",
                    other,
                    mib(case["peak_resident"]),
                    f"{case['reading'] or 'buffered'}, {case['writing'] or 'buffered'}",
                ]
            )
        head = ["", "rows", "embermap", "CPU s/GB", "of cp", "beside (its CPU, resident)"]
        head += ["resident", "read, written"]
        settings = found["settings"]
        out.append(
            f"**{machine['name']}**: {settings['rows']:,} x {settings['dim']} float32, "
            f"{settings['rounds']} rounds (load {found['load']:.1f} at the beginning)\n\n"
            + table(head, rows)
        )
    return "## Files into files\n\n" + "\n".join(out) if out else ""


def size_text(size: float) -> str:
    """Bytes as people say them."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20)):
        if size >= scale / 2:
            return f"{size / scale:g} {unit}"
    return f"{size:,.0f} B"


def gpu_text(machines: list[dict[str, Any]], plot: str) -> str:
    """Rows to and from a GPU, of machines that have one."""
    kept = [m for m in machines if m.get("gpu", {}).get("cases")]
    if not kept:
        return ""
    out = []
    for machine in kept:
        out.append(f"**{machine['name']}**")
        out += [part for op in ("to", "from") if (part := gpu_table(machine, op))]
        out += [part for part in (gpu_steps(machine), gpu_trouble(machine)) if part]
    text = (Path(__file__).parent / "benchmarks_gpu.md.in").read_text(encoding="utf-8")
    return text.replace("{plot}", plot).replace("{tables}", "\n\n".join(out))


def gpu_table(machine: dict[str, Any], op: str) -> str:
    """All times in one direction."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in machine["gpu"]["cases"]:
        if entry["op"] == op and "error" not in entry:
            found.setdefault(entry["case"], {})[entry["way"]] = entry
    ways = [w for w in GPU_WAYS[1:] if any(w in entries for entries in found.values())]
    if not found:
        return ""
    rows = []
    for by_way in found.values():
        any_way = next(iter(by_way.values()))
        own_time = by_way.get("embermap")
        cells = [
            f"{any_way['ids']:,}",
            any_way["order"].replace("zipf:", "Zipf "),
            f"{any_way['row_bytes']:,} B",
            size_text(any_way["pool_bytes"]),
            str(any_way["threads"]),
            "" if own_time is None else f"{own_time['seconds'] * 1e3:.3g}",
            "" if own_time is None else f"{own_time['bytes_per_second'] / 1e9:.1f}",
            f"{own_time['limit_ratio']:.2f}" if own_time and "limit_ratio" in own_time else "",
        ]
        for way in ways:
            entry = by_way.get(way)
            if entry is None:
                cells.append("")
                continue
            ratio = entry.get("embermap_ratio")
            text = f"{entry['seconds'] * 1e3:.3g}"
            cells.append(text if ratio is None else f"{text} (**{ratio:.2f}**)")
        rows.append(cells)
    header = ["ids", "order", "row", "pool", "threads", "embermap", "GB/s", "of the link", *ways]
    return (
        f"{op.capitalize()} the GPU, in ms; in brackets embermap's speed divided by that way's.\n\n"
        + table(header, rows).rstrip()
    )


def gpu_steps(machine: dict[str, Any]) -> str:
    """Beside computing, and training."""
    rows = []
    for entry in gpu_entries(machine, "beside-.*", threads=None):
        where = entry["op"].removeprefix("beside-")
        rows.append(
            [
                f"a matrix product beside {entry['ids']:,} rows of {entry['row_bytes']:,} B "
                f"{where} the GPU, again and again",
                f"{entry['slowdown']:+.1%} longer",
                f"{entry['calls_per_second']:,.0f} calls/s, alone "
                f"{entry['calls_per_second_alone']:,.0f}",
            ]
        )
    for entry in gpu_entries(machine, "overlap", threads=None):
        rows.append(
            [
                f"a loop: compute, {entry['ids']:,} rows of {entry['row_bytes']:,} B there, their "
                "update back",
                f"{entry['compute_ratio']:.3f} of computing alone",
                f"{entry['seconds'] * 1e3:.2f} ms a step, transfers alone "
                f"{entry['transfer_seconds'] * 1e3:.2f}",
            ]
        )
    training = gpu_entries(machine, "training", threads=None)
    for entry in training:
        ratio = entry.get("embermap_ratio")
        shape = TRAINING.get(entry["case"].split("/")[1], "another")
        rows.append(
            [
                f"training step of {shape}'s shape: {entry['way']}",
                f"{entry['seconds'] * 1e3:.2f} ms",
                "" if ratio is None else f"embermap: {ratio:.2f} x",
            ]
        )
    if not rows:
        return ""
    about = (
        "\nLit2Vec2's step: 128 targets, 132 contexts each, two tables of 2,829,854 x 400 with "
        "Adagrad. Research2Vec2's: 512 targets, 136 contexts each, two of 14,886,545 x 188 with "
        "SGD; in SpeedTorch's way the targets' table is in GPU memory, as its user had it. Loops "
        "are those that people write; where the next batch is prefetched they have a line more. "
        "embermap and torch in GPU memory sum the gradients of an id that comes twice; in "
        "SpeedTorch's way the last one stays.\n"
        if training
        else ""
    )
    return table(["beside computing, and in training", "", ""], rows) + about


def gpu_trouble(machine: dict[str, Any]) -> str:
    """What failed, notes of the run, and what embermap tells of how it moved rows."""
    suite = machine["gpu"]
    lines = [f"- {note}" for note in suite.get("notes", [])]
    lines += [f"- {e['way']}, {e['case']}: {e['error']}" for e in suite["cases"] if "error" in e]
    return "\n".join(lines)


def draw(folder: Path) -> None:
    """Make page and plots from the results that are there."""
    machines = load(folder)
    if not machines:
        raise ReportError(f"no results in {folder / 'benchmarks'}: `report.py run --name NAME`")
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError("matplotlib is not installed: the plots need it") from error
    matplotlib.use("Agg")
    plots = folder / "benchmarks"
    compared = [m for m in machines if m.get("out_of_core", {}).get("cases")]
    parts = {
        "goals": goals_table(machines),
        "ratios": plot_ratios(compared, plots / "ratios.png")
        and "![embermap beside other stores](benchmarks/ratios.png)",
        "throughput": plot_throughput(compared, plots / "throughput.png")
        and "![Rows a second](benchmarks/throughput.png)",
        "ngrams": plot_memory(machines, plots / "memory.png") and ngrams_text(machines),
        "machines": machines_table(machines),
        "bench": bench_text(machines),
        "durability": durability_text(machines),
        "convert": convert_text(machines),
        "gpu": gpu_text(
            machines,
            "![GB/s to and from the GPU](benchmarks/gpu.png)"
            if plot_gpu(machines, plots / "gpu.png")
            else "",
        ),
        "results": "\n\n".join(
            f"## Results: {m['name']}\n\n{results_tables(m)}\n{trouble(m)}" for m in compared
        ),
    }
    text = (Path(__file__).parent / "benchmarks.md.in").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace("{" + name + "}", part or "")
    text = re.sub(r"\n{3,}", "\n\n", text)
    (folder / "benchmarks.md").write_text(text, encoding="utf-8")
    print(f"Made {folder / 'benchmarks.md'} from {', '.join(m['name'] for m in machines)}")


# --- command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="report.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="default: docs/")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run suites, keep their results, draw")
    add = runs.add_argument
    add("--name", required=True, help='of this machine: "2 cores, virtual disk"; no host names')
    add("--only", action="append", choices=SUITES, help="these suites (default: all)")
    add("--quick", action="store_true", help="tiny tables, a few cases: a try, not a result")
    default = Path(os.environ.get("TMPDIR") or "/var/tmp")
    add("--folder", type=Path, default=default, help="where tables are made (TMPDIR, or /var/tmp)")
    for option, what in (
        ("size", "bytes of the table (8GiB), and of the files of convert (1GiB)"),
        ("memory", "of each process (a tenth)"),
        ("seconds", "of a timed run"),
        ("rounds", "of each case"),
        ("threads", "of embermap and torch"),
    ):
        add(f"--{option}", help=f"out_of_core: {what}")
    add("--cases", action="append", metavar="PATTERN", help="out_of_core: these cases")
    add("--rivals", action="append", metavar="NAME", help="out_of_core: these stores")
    add("--gpu-suite", action="append", metavar="NAME", help="gpu: these of its suites")
    add("--gpu-cases", action="append", metavar="PATTERN", help="gpu: these cases")
    add("--gpu-pools", metavar="SIZES", help="gpu: tables of these sizes, 1GiB,8GiB")
    add("--minutes", type=float, default=5.0, help="ngrams: how long to train (default 5)")
    add("--disk", default="4GiB", help="ngrams: how much disk to use (default 4GiB)")
    add("--text", type=Path, help="ngrams: another text than the dictionary")
    add("--large", action="store_true", help="convert: 20 GB and a billion rows too, 40 GB of disk")
    commands.add_parser("draw", help="make page and plots from all results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run or draw. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        if args.command == "draw":
            draw(args.out)
            return 0
        return run(args)
    except (ReportError, OSError, KeyError, ValueError) as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("report.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
