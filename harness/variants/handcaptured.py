"""The whole step captured by hand into one CUDA graph: what an expert writes today, and so the baseline to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.variants.catalogue import Variant
from harness.variants.training import Ingredients, Training, compiled
from models.workload import map_tensors, tensors_of

_WARM_UP_STEPS = 3


class HandCapturedTraining(Training):
    """zero_grad, forward, loss, backward and a capturable fused Adam in one CUDA graph.

    The first three steps warm up eagerly on a side stream, as capturing needs; the next one captures and replays, and
    all later ones replay. Each copies its batch into static buffers.
    """

    def __init__(self, variant: Variant, ingredients: Ingredients) -> None:
        super().__init__(ingredients)
        self._model = compiled(variant, ingredients.model)
        self._optimizer = ingredients.adam(fused=True, capturable=True)
        x, y = ingredients.batches[0]
        self._x, self._y = map_tensors(torch.empty_like, x), torch.empty_like(y)
        self._warm_up_steps = 0
        self._side = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor

    @property
    def settled(self) -> bool:
        return self._graph is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def _run(self, steps: int) -> Tensor:
        static = (*tensors_of(self._x), self._y)
        for x, y in self._take(steps):
            for target, source in zip(static, (*tensors_of(x), y), strict=True):
                target.copy_(source)
            if self._graph is None and self._warm_up_steps < _WARM_UP_STEPS:
                self._warm_up()
                continue
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()
        return self._loss

    def _warm_up(self) -> None:
        """One eager step on a side stream: everything that allocates or searches once does it here."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._loss = self._step()
        current.wait_stream(self._side)
        self._warm_up_steps += 1

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._loss = self._step()
        return graph

    def _step(self) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        with self._ingredients.autocast():
            loss = self._ingredients.loss_fn(self._model(self._x), self._y)
        loss.backward()
        self._optimizer.step()
        return loss.detach()
