"""torch.profiler around a loop, unchanged but for one line: `python -m examples.with_profiler --synthetic`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import kitsune
from examples.data import add_data_options, batches
from examples.mnist import Net
from examples.run import Run, add_options
from models import datasets
from models.synthetic import SyntheticImages


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains, and prints what some of the steps spent their time on."""
    parser = argparse.ArgumentParser(prog="python -m examples.with_profiler", description="MNIST under torch.profiler.")
    add_options(parser, batch_size=64)
    add_data_options(parser)
    parser.add_argument("--wait", type=int, default=20, metavar="N", help="steps before the first (default: 20)")
    parser.add_argument("--active", type=int, default=5, metavar="N", help="steps that are profiled (default: 5)")
    parser.add_argument("--rows", type=int, default=15, metavar="N", help="lines of the table (default: 15)")
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write a trace for https://ui.perfetto.dev")
    options = parser.parse_args(arguments)
    run = Run(options)
    train_loader, _ = batches(SyntheticImages((1, 28, 28)), datasets.mnist, parser, options)

    model = Net().to(run.device)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    def show(profiled: profile) -> None:
        order = "self_cuda_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        print(profiled.key_averages().table(sort_by=order, row_limit=options.rows))
        if options.trace is not None:
            profiled.export_chrome_trace(str(options.trace))
            print(f"trace: {options.trace}")

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (run.device.type == "cuda")
    steps = schedule(wait=options.wait, warmup=2, active=options.active, repeat=1)
    with profile(activities=activities, schedule=steps, on_trace_ready=show) as profiler:
        for epoch in range(1, options.epochs + 1):
            for index, (data, target) in enumerate(train_loader):
                data, target = data.to(run.device), target.to(run.device)
                optimizer.zero_grad()
                with record_function("forward"):
                    loss = functional.nll_loss(model(data), target)
                with record_function("backward"):
                    loss.backward()
                optimizer.step()
                profiler.step()
                if index % 10 == 0:
                    run.log(f"epoch {epoch}, batch {index} of {len(train_loader)}", loss=loss.item())
    return run.finish(optimizer)


if __name__ == "__main__":
    main()
