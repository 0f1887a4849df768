"""A graph network that classifies nodes, its messages summed by `index_add`."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.drawing import generator
from models.workload import Workload
from models.zoo.drawn import Drawn

_NUM_CLASSES = 40
_EDGES_PER_NODE = 7.5
_SIGNAL = 0.5


class GraphNetwork(nn.Module):
    """Layers of a graph convolution (Kipf and Welling, 2016) without normalization: each node sums what arrives.

    128-256-256-40 features by default, with ReLU between.
    """

    def __init__(self, sizes: tuple[int, ...] = (128, 256, 256, _NUM_CLASSES)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(sizes))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (N, sizes[-1]) of nodes (N, sizes[0]) float32 and edges (2, E) int64.

        Edges lead from the first row's nodes to the second's. A node to which none leads has logits of 0.
        """
        hidden, edges = x
        for index, layer in enumerate(self.layers):
            messages = layer(hidden)
            hidden = torch.zeros_like(messages).index_add(0, edges[1], messages[edges[0]])
            if index < len(self.layers) - 1:
                hidden = functional.relu(hidden)
        return hidden


@dataclass(frozen=True)
class Graphs(Drawn):
    """Graphs of nodes of 40 classes, each with features of its class in noise; most edges join nodes of one class."""

    num_features: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Nodes (batch_size, num_features) float32, edges (2, 7.5 * batch_size) int64; classes (batch_size,) int64."""
        classes = torch.arange(batch_size) % _NUM_CLASSES
        prototypes = torch.randn((_NUM_CLASSES, self.num_features), generator=generator("nodes", self.num_features))
        noise = torch.randn((batch_size, self.num_features), generator=source)
        shape = (int(_EDGES_PER_NODE * batch_size),)
        targets = torch.randint(batch_size, shape, generator=source)
        rounds = torch.randint(max(1, batch_size // _NUM_CLASSES), shape, generator=source)
        friends = classes[targets] + _NUM_CLASSES * rounds
        others = torch.randint(batch_size, shape, generator=source)
        is_friend = torch.rand(shape, generator=source) < 0.8
        return (
            _SIGNAL * prototypes[classes] + noise,
            torch.stack([torch.where(is_friend, friends, others), targets]),
        ), classes


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The mean cross-entropy of logits (N, C) against classes (N,) int64, computed in float32."""
    return functional.cross_entropy(logits.float(), classes)


def workload(*, tiny: bool) -> Workload:
    """The graph network on 8,000 nodes and 60,000 edges (on the CPU fewer); the batch size is the number of nodes."""
    return Workload(
        name="graph_network",
        module=GraphNetwork((16, 16, 16, _NUM_CLASSES)) if tiny else GraphNetwork(),
        loss_fn=class_loss,
        data=Graphs(16 if tiny else 128),
        default_batch_size={"cpu": 400, "cuda": 8000},
        learning_rate=1e-3,
    )
