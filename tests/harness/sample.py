"""Invented results for tests, shaped like real ones: noise in blocks, processes and the machine; skips; losses; memory.

Nothing made here ever lies under the project's own ``results/``.
"""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from harness.store import Store

MEBIBYTE = 2**20
STARTED = datetime(2026, 11, 25, tzinfo=timezone.utc)
COMMITS = ("3f1c9a20" * 5, "8b2e77d4" * 5, "c05d61ef" * 5)
GPU_MACHINE = "nvidia-h200"
CPU_MACHINE = "xeon-2-cores"

_GPU_FACTS = {
    "device": "NVIDIA H200", "device_type": "cuda", "driver": "580.159.03", "cuda": "13.0", "cudnn": "91300",
    "torch": "2.13.0+cu130", "triton": "3.6.0", "python": "3.12.3", "os": "Linux 6.18", "cpu": "INTEL(R) XEON(R)",
    "cores": 16, "threads": 16, "ram_bytes": 128 * 2**30, "gpu_memory_bytes": 139 * 2**30,
    "gpu_uuid": "0c5b7f9e", "boot_id": "5f1d3b60",
}  # fmt: skip
_CPU_FACTS = {
    "device": "Intel(R) Xeon(R) Processor @ 2.60GHz", "device_type": "cpu", "driver": None, "cuda": None, "cudnn": None,
    "torch": "2.13.0+cpu", "triton": None, "python": "3.11.7", "os": "Linux 6.18",
    "cpu": "Intel(R) Xeon(R) Processor @ 2.60GHz", "cores": 2, "threads": 2, "ram_bytes": 8 * 2**30,
    "gpu_memory_bytes": None, "gpu_uuid": None, "boot_id": "84a2c7d1",
}  # fmt: skip

_VARIANTS = (
    "eager_fp32", "eager_tf32", "eager_amp", "compile_fp32", "compile_amp", "compile_reduce_overhead_amp",
    "handcaptured_fp32", "handcaptured_amp", "handcaptured_compile_fp32", "handcaptured_compile_amp",
    "kitsune_dropin_fp32", "kitsune_dropin_amp", "kitsune_deferred_fp32", "kitsune_deferred_amp",
    "kitsune_trainstep_fp32", "kitsune_trainstep_amp",
    "kitsune_dropin_unfused_fp32", "kitsune_dropin_unfused_amp",
    "kitsune_trainstep_one_stream_fp32", "kitsune_trainstep_one_stream_amp",
    "kitsune_trainstep_unfused_fp32", "kitsune_trainstep_unfused_amp",
)  # fmt: skip
_GPU_MICROSECONDS = {
    ("mlp", 64): (
        1315, 1251, 1449, 1580, 1675, 1222, 128, 113, 109, 94, 430, 455, 270, 285, 121, 104, 450, 470, 121, 112, 124,
        118,
    ),
    ("lenet", 64): (
        1863, 1935, 2262, 2350, 2484, 1313, 322, 301, 217, 223, 760, 742, 480, 470, 305, 280, 790, 781, 306, 296, 310,
        302,
    ),
    ("resnet18", 128): (
        7188, 7110, 5113, 6702, 6405, 2636, 4920, 2852, 3988, 2373, 5210, 3120, 5120, 3010, 4890, 2820, 5320, 3240,
        4895, 2795, 4930, 2861,
    ),
}  # fmt: skip
_SWEEP_VARIANTS = ("eager_amp", "handcaptured_amp", "kitsune_trainstep_amp", "kitsune_trainstep_one_stream_amp")
_SWEEP_MICROSECONDS = {
    ("mlp", 8): (1440, 108, 96, 108),
    ("mlp", 128): (1451, 118, 110, 115),
    ("mlp", 512): (1478, 150, 148, 148),
    ("lenet", 8): (2250, 260, 210, 258),
    ("lenet", 128): (2270, 340, 318, 335),
    ("lenet", 512): (2600, 610, 604, 606),
    ("resnet18", 8): (4900, 1410, 1290, 1400),
    ("resnet18", 64): (4950, 1950, 1880, 1930),
    ("resnet18", 512): (13900, 10100, 10080, 10060),
}
_CPU_MICROSECONDS = {
    ("mlp", 64): {
        "eager_fp32": 2050,
        "compile_fp32": 1640,
        "kitsune_dropin_fp32": 2060,
        "kitsune_trainstep_fp32": 1890,
    },
    ("lenet", 64): {"eager_fp32": 8200, "kitsune_dropin_fp32": 8240, "kitsune_trainstep_fp32": 8010},
    ("resnet18", 8): {"eager_fp32": 301000, "kitsune_dropin_fp32": 300500, "kitsune_trainstep_fp32": 302000},
}
_LONG_VARIANTS = (
    "eager_fp32", "eager_amp", "kitsune_dropin_fp32", "kitsune_dropin_amp", "kitsune_trainstep_fp32",
    "kitsune_trainstep_amp",
)  # fmt: skip
_MEMORY_MIB = {"mlp": 38, "lenet": 52, "resnet18": 746}
_KITSUNE_BY_COMMIT = (1.22, 1.0, 1.0)
"""Kitsune's times as multiples of those above: the second commit made it faster."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of log-times: of the machine between rounds (it moves all variants together), of each variant
    between rounds (processes differ), and of single blocks within a round.
    """

    machine: float = 0.02
    process: float = 0.004
    block: float = 0.01


@dataclass
class Simulator:
    """Draws blocks of times around true ones."""

    rng: random.Random
    noise: Noise = field(default_factory=Noise)

    def blocks(self, seconds: Mapping[str, float], turns: int = 7) -> dict[str, list[float]]:
        """One round: for each variant the seconds per step of its blocks, entry i taken in the same turn."""
        machine = self.rng.gauss(0, self.noise.machine)
        process = {variant: self.rng.gauss(0, self.noise.process) for variant in seconds}
        drift = [self.rng.gauss(0, self.noise.block) for _ in range(turns)]
        return {
            variant: [
                true * math.exp(machine + process[variant] + drift[turn] + self.rng.gauss(0, self.noise.block))
                for turn in range(turns)
            ]
            for variant, true in seconds.items()
        }


def run_record(run: str, commit: str, facts: Mapping[str, object], *, started: datetime) -> dict[str, object]:
    return {
        "kind": "run", "run": run, "commit": commit, "started": started.isoformat(), "facts": dict(facts),
        "kitsune_file": f"/commits/{commit[:8]}/kitsune/__init__.py", "harness_file": "/commits/harness/__init__.py",
        "profile": "full",
    }  # fmt: skip


def case_fields(model: str, batch: int, device: str) -> dict[str, object]:
    return {"case": f"{model}-b{batch}", "model": model, "batch": batch, "device": device}


def plan_fields(strategy: str, num_streams: int = 1, *, fused: bool = True) -> dict[str, object]:
    return {"strategy": strategy, "num_streams": num_streams, "fused": fused}


def round_record(
    run: str,
    index: int,
    case: Mapping[str, object],
    blocks: Mapping[str, Sequence[float]],
    plans: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """A round; without ``plans`` like those of earlier versions: they had one number of steps for all variants, too."""
    on_gpu = case["device"] == "cuda"
    entries = {
        variant: {"wall_s": [1.02 * time for time in times], "device_s": list(times)}
        if on_gpu
        else {"wall_s": list(times), "device_s": None}
        for variant, times in blocks.items()
    }
    told = {} if plans is None else {"plans": plans}
    steps: object = 50 if plans is None else dict.fromkeys(blocks, 50)
    return {"kind": "round", "run": run, "round": index, **case, "steps_per_block": steps, "blocks": entries, **told}


def profile_record(
    run: str, case: Mapping[str, object], variant: str, rng: random.Random, *, learns: bool = True
) -> dict[str, object]:
    on_gpu = case["device"] == "cuda"
    mebibytes = _MEMORY_MIB.get(str(case["model"]), 60) * (0.62 if variant.endswith("amp") else 1.0)
    mebibytes += 66 if variant.startswith(("handcaptured", "kitsune")) else 0
    setup = 0.4 + 17.0 * ("compile" in variant) + 0.9 * variant.startswith("handcaptured")
    setup += 3.1 * variant.startswith("kitsune")
    kept: dict[str, object] = {}
    if on_gpu and variant.startswith(("compile", "kitsune")):
        is_known = variant == "compile_amp"  # to this machine, from an earlier run
        kept = {"caches": "warm" if is_known else "cold", "setup_again_s": None if is_known else 0.2 * setup}
    if on_gpu and variant.startswith("kitsune"):
        kept |= {"first_replay_s": 0.6 * setup, "first_replay_again_s": 0.1 * setup}
    losses = [
        [step, 2.31 * math.exp(-step / 60) * (1 + rng.gauss(0, 0.004)) + 0.05 if learns else 2.31]
        for step in range(0, 201, 10)
    ]
    status: dict[str, object] | None = None
    if variant.startswith("kitsune"):
        status = {"mode": "replay", "reason": None, "gain": 3.1}
    if status is not None and "trainstep" in variant and on_gpu:
        on_streams = variant == "kitsune_trainstep_amp"
        from tests.harness import plans  # imports torch, which the processes of some tests need not

        fusions = () if "unfused" in variant else plans.FUSIONS
        status["plan"] = plans.document(num_tasks=40, num_streams=2 if on_streams else 1, fusions=fusions)
        chosen = plan_fields("list", 2 if on_streams else 1, fused=bool(fusions))
        status["schedules"] = [plan_fields("in order") | {"chosen": False}, chosen | {"chosen": True}]
    memory: dict[str, object] = {"memory_timeline_missing": "torch 9 does not record its allocations: no such function"}
    if variant != "compile_fp32":
        is_captured = variant.startswith(("handcaptured", "kitsune"))
        memory = {"memory_timeline": memory_timeline(mebibytes, captured=is_captured)}
    return {
        "kind": "profile", "run": run, **case, "variant": variant, "precision": variant.rpartition("_")[2],
        "setup_s": setup * (1 + abs(rng.gauss(0, 0.1))),
        "peak_allocated_bytes": int(mebibytes * MEBIBYTE) if on_gpu else None,
        "peak_reserved_bytes": int(mebibytes * 1.2 * MEBIBYTE) if on_gpu else None,
        "peak_rss_bytes": int((420 + mebibytes) * MEBIBYTE), "losses": losses, "kitsune": status, **kept,
        "inactive_split_bytes": int(mebibytes * 0.07 * MEBIBYTE) if on_gpu else None, **(memory if on_gpu else {}),
    }  # fmt: skip


def memory_timeline(peak_mebibytes: float, *, captured: bool) -> dict[str, object]:
    """A step that takes memory forward and returns it backward; a captured one has it all the time."""
    shares = (
        [1.0] if captured else [0.4, *(0.4 + 0.06 * k for k in range(1, 11)), *(1.0 - 0.06 * k for k in range(1, 11))]
    )
    sizes = [int(share * peak_mebibytes * MEBIBYTE) for share in shares]
    reserved = int(1.2 * peak_mebibytes * MEBIBYTE)
    return {"step_us": 900.0, "points": [[40.0 * index, size, reserved] for index, size in enumerate(sizes)]}


def phases_record(run: str, case: Mapping[str, object], variant: str, seconds: float) -> dict[str, object]:
    """Three profiled steps of a variant, on a GPU with a host gap; of a whole captured step there is one phase."""
    on_gpu = case["device"] == "cuda"
    is_whole = variant.startswith("handcaptured") or "trainstep" in variant
    shares = {"whole step": 0.97} if is_whole else {"data": 0.0, "forward": 0.28, "backward": 0.4, "optimizer": 0.12}
    gap = (1 - sum(shares.values())) * seconds
    if not on_gpu:
        shares["other"] = 1 - sum(shares.values())
    steps = (1.1, 1.0, 0.9)
    return {
        "kind": "phases", "run": run, **case, "variant": variant, "precision": variant.rpartition("_")[2],
        "clock": "device" if on_gpu else "wall",
        "phases_s": {phase: [step * share * seconds for step in steps] for phase, share in shares.items()},
        "host_gap_s": [step * gap for step in steps] if on_gpu else None,
        "trace": f"traces/{'ab' * 6}/{run}-{case['case']}-{case['device']}-{variant}.json.gz", "trace_missing": None,
    }  # fmt: skip


def failed_phases_record(run: str, case: Mapping[str, object], variant: str, reason: str) -> dict[str, object]:
    return phases_record(run, case, variant, 1.0) | {"phases_s": {}, "failure": reason, "trace": None}


def skip_record(
    run: str, case: Mapping[str, object], variant: str, reason: str, status: str = "skipped"
) -> dict[str, object]:
    return {
        "kind": "skip", "run": run, **case, "variant": variant, "precision": variant.rpartition("_")[2],
        "status": status, "reason": reason,
    }  # fmt: skip


def write_gpu_history(
    root: Path, *, seed: int = 0, rounds: int = 5, slowdown: float = 1.0, sweep: bool = False
) -> None:
    """Three commits on a GPU: the first has no ``TrainStep``, the second is faster and the last without ``defer_loss``,
    in the third one variant fails.

    ``slowdown`` multiplies the time of Kitsune's autocast ``TrainStep`` for LeNet at the third commit. With ``sweep``
    that commit was timed at other batch sizes too, as the quick profile does. At it the phases of steps were told
    apart, but for one variant that failed. Rounds of LeNet alone record the plans that Kitsune chose.
    """
    rng = random.Random(seed)
    simulator = Simulator(rng)
    for index, commit in enumerate(COMMITS):
        run = f"run-{index}"
        started = datetime(2026, 11, 18 + index, 9, 30, tzinfo=timezone.utc)
        records = [run_record(run, commit, _GPU_FACTS, started=started)]
        for (model, batch), microseconds in _GPU_MICROSECONDS.items():
            case = case_fields(model, batch, "cuda")
            seconds = dict(zip(_VARIANTS, (time * 1e-6 for time in microseconds), strict=True))
            for variant in list(seconds):
                if variant.startswith("kitsune"):
                    seconds[variant] *= _KITSUNE_BY_COMMIT[index]
                if index == 0 and variant.startswith("kitsune_trainstep"):
                    del seconds[variant]
                    records.append(skip_record(run, case, variant, "this commit's kitsune has no TrainStep"))
                if index < 2 and variant.startswith("kitsune_deferred"):
                    del seconds[variant]
                    records.append(skip_record(run, case, variant, "this commit's kitsune has no option defer_loss"))
            if index == 2 and model == "lenet":
                seconds["kitsune_trainstep_amp"] *= slowdown
            if index == 2 and model == "resnet18":
                del seconds["compile_reduce_overhead_amp"]
                reason = (
                    "RuntimeError: CUDA graph replay overwrote a live tensor; accessing tensor output of CUDAGraphs"
                )
                records.append(skip_record(run, case, "compile_reduce_overhead_amp", reason, "failed"))
            records += [
                round_record(run, k, case, simulator.blocks(seconds), _plans(case, seconds, k)) for k in range(rounds)
            ]
            records += [profile_record(run, case, variant, rng) for variant in seconds]
            if index == 2:
                records += [
                    phases_record(run, case, name, time) for name, time in seconds.items() if "tf32" not in name
                ]
                reason = "TraceError: in 3 of 12 steps the profiler saw nothing run on the device\nTraceback …"
                records.append(failed_phases_record(run, case, "eager_tf32", reason))
        if sweep:
            records += _sweep_records(run, simulator, rounds, at_head=index == len(COMMITS) - 1)
        Store(root).append(GPU_MACHINE, commit, records)


def _sweep_records(run: str, simulator: Simulator, rounds: int, *, at_head: bool) -> list[dict[str, object]]:
    """Times alone at head, and why not before it; what is not in the sweep is left out everywhere."""
    records = []
    for (model, batch), microseconds in _SWEEP_MICROSECONDS.items():
        case = case_fields(model, batch, "cuda")
        for variant in _VARIANTS:
            if variant not in _SWEEP_VARIANTS:
                records.append(skip_record(run, case, variant, "not part of the quick profile", "left out"))
            elif not at_head:
                records.append(skip_record(run, case, variant, "measured at HEAD only", "left out"))
        if at_head:
            seconds = dict(zip(_SWEEP_VARIANTS, (time * 1e-6 for time in microseconds), strict=True))
            records += [
                round_record(run, k, case, simulator.blocks(seconds), _plans(case, seconds, k)) for k in range(rounds)
            ]
    return records


def _plans(case: Mapping[str, object], variants: Iterable[str], index: int) -> dict[str, object] | None:
    """LeNet alone has them: ``TrainStep`` chose two streams, but for every third round and the largest batch size."""
    if case["model"] != "lenet":
        return None
    in_order = index % 3 == 0 or case["batch"] == 512
    return {
        name: plan_fields("in order", fused="unfused" not in name)
        if in_order or name not in ("kitsune_trainstep_fp32", "kitsune_trainstep_amp")
        else plan_fields("list", 2)
        for name in variants
        if "trainstep" in name
    }


def write_asv_files(root: Path, machine: str, commits: Iterable[str]) -> None:
    """What asv keeps beside samples, as little as it reads."""
    (root / "benchmarks.json").write_text('{"version": 2}')
    (root / machine / "machine.json").write_text(json.dumps({"version": 1, "machine": machine}))
    for commit in commits:
        fields = {
            "version": 2, "commit_hash": commit, "date": 0, "env_name": "shared-py3.12", "params": {"machine": machine},
            "python": "3.12", "requirements": {}, "results": {},
        }  # fmt: skip
        (root / machine / f"{commit[:8]}-shared-py3.12.json").write_text(json.dumps(fields))


def write_cpu_history(root: Path, *, seed: int = 1, rounds: int = 3) -> None:
    """Three commits on a CPU, a day later: what needs a GPU is skipped, and so is most compiling."""
    rng = random.Random(seed)
    simulator = Simulator(rng, Noise(machine=0.05, process=0.01, block=0.03))
    for index, commit in enumerate(COMMITS):
        run = f"cpu-run-{index}"
        started = datetime(2026, 11, 19 + index, 9, 30, tzinfo=timezone.utc) + timedelta(hours=5)
        records = [run_record(run, commit, _CPU_FACTS, started=started)]
        for (model, batch), microseconds in _CPU_MICROSECONDS.items():
            case = case_fields(model, batch, "cpu")
            seconds = {
                variant: time * 1e-6 for variant, time in microseconds.items() if index == 2 or "compile" not in variant
            }
            for variant in _VARIANTS:
                if variant not in seconds:
                    graphs = variant.startswith("handcaptured") or "reduce" in variant
                    reason = "CUDA graphs exist on CUDA devices only" if graphs else "not part of the quick profile"
                    if "one_stream" in variant:
                        reason = "without CUDA there are no streams to choose from"
                    if "unfused" in variant:
                        reason = "without CUDA nothing is fused"
                    records.append(skip_record(run, case, variant, reason))
            records += [round_record(run, k, case, simulator.blocks(seconds)) for k in range(rounds)]
            records += [profile_record(run, case, variant, rng) for variant in seconds]
        Store(root).append(CPU_MACHINE, commit, records)


def write_long_history(root: Path, *, commits: int = 200, models: int = 50, seed: int = 2) -> None:
    """Four of Kitsune's forms in each of many models at many commits, a tenth of the models slower from the middle on
    and one in sixteen at the last commit; another driver after three quarters; profiles at the last commit alone.
    """
    rng = random.Random(seed)
    simulator = Simulator(rng)
    seconds = dict(zip(_LONG_VARIANTS, (1.3e-3, 1.4e-3, 4.3e-4, 4.5e-4, 1.2e-4, 1.1e-4), strict=True))
    for index in range(commits):
        run, is_last = f"long-{index}", index == commits - 1
        facts = _GPU_FACTS | {"driver": "580.159.03" if index < 3 * commits // 4 else "590.44.01"}
        started = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=6 * index)
        commit = f"{index:08x}" * 5
        records = [run_record(run, commit, facts, started=started)]
        for number in range(models):
            case = case_fields(f"model{number:02}", 64, "cuda")
            slowdown = 1.08 if number % 10 == 3 and index >= commits // 2 else 1.0
            slowdown *= 1.15 if number % 16 == 5 and is_last else 1.0
            times = {name: time * (slowdown if "kitsune" in name else 1.0) for name, time in seconds.items()}
            records += [round_record(run, k, case, simulator.blocks(times, turns=3)) for k in range(3)]
            if is_last:
                records += [profile_record(run, case, variant, rng) for variant in times]
        Store(root).append(GPU_MACHINE, commit, records)


_ZOO_MICROSECONDS = {
    ("dlrm", 2048): (5200, 3100, 1900, 1650, 1500, 1480, 1700, 1690, 1460),
    ("policy_value", 256): (1100, 900, 420, 95, 90, 91, 210, 150, 82),
    ("lstm", 32): (4100, 4000, 3900, 3300, 3250, None, 4120, 4110, 4090),
}
_ZOO_VARIANTS = (
    "eager_amp", "compile_amp", "compile_reduce_overhead_amp", "handcaptured_amp", "handcaptured_compile_amp",
    "handcaptured_compile_max_autotune_amp", "kitsune_dropin_amp", "kitsune_deferred_amp", "kitsune_trainstep_amp",
)  # fmt: skip


def write_zoo_history(root: Path, *, seed: int = 3, rounds: int = 3) -> None:
    """One commit on a GPU, of the zoo's profile: of LSTM a peer fails, and Kitsune runs it as plain PyTorch; a model's
    package is not installed.
    """
    rng = random.Random(seed)
    simulator = Simulator(rng)
    run, commit = "zoo-run", COMMITS[-1]
    records = [run_record(run, commit, _GPU_FACTS, started=STARTED) | {"profile": "zoo"}]
    for (model, batch), microseconds in _ZOO_MICROSECONDS.items():
        case = case_fields(model, batch, "cuda")
        timed = zip(_ZOO_VARIANTS, microseconds, strict=True)
        seconds = {name: time * 1e-6 for name, time in timed if time is not None}
        records += [
            skip_record(run, case, name, "RuntimeError: no kernel fits\nTraceback …", "failed")
            for name in _ZOO_VARIANTS
            if name not in seconds
        ]
        records += [round_record(run, k, case, simulator.blocks(seconds)) for k in range(rounds)]
        for name in seconds:
            profile = profile_record(run, case, name, rng)
            if name.startswith("kitsune"):
                aside = {"mode": "eager", "reason": "a recurrent layer of torch is called"}
                profile["kitsune"] = {"setup_seconds": 2.5, **(aside if model == "lstm" else {"mode": "replay"})}
            profile["continuation"] = _continuation(model, name)
            records.append(profile)
    absent = case_fields("timm_vit_small", 32, "cuda")
    records += [skip_record(run, absent, name, "timm is not installed: install it") for name in (*_VARIANTS, _TUNED)]
    Store(root).append(GPU_MACHINE, commit, records)


def _continuation(model: str, variant: str) -> dict[str, object]:
    """Twenty losses from one state: Kitsune's drop-in form is wrong on one model."""
    eager = [2.0 - 0.05 * step for step in range(20)]
    apart = 1.3 if (model, variant) == ("policy_value", "kitsune_dropin_amp") else 1.001
    is_replayed = variant.startswith("kitsune") and model != "lstm"
    return {
        "losses": eager if variant == "eager_amp" else [apart * loss for loss in eager], "eager": eager,
        "eager_again": [1.0005 * loss for loss in eager], "num_replays": 20 if is_replayed else 0,
    }  # fmt: skip


_TUNED = "handcaptured_compile_max_autotune_amp"
