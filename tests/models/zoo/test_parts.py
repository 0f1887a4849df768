"""Parts of the zoo's models against slower or published formulations of the same."""

import math

import torch
from torch.nn import functional

from models.zoo.graph_network import GraphNetwork
from models.zoo.physics import PhysicsInformedNetwork
from models.zoo.point_cloud import PointNet
from models.zoo.radiance_field import encoded
from models.zoo.state_space import SelectiveStateSpace
from models.zoo.translation import shifted
from models.zoo.two_towers import contrastive_loss


def test_messages_of_a_graph_are_a_product_with_its_matrix() -> None:
    torch.manual_seed(0)
    module = GraphNetwork((4, 8, 3))
    nodes, edges = torch.randn(5, 4), torch.randint(5, (2, 20))
    matrix = torch.zeros(5, 5).index_put_((edges[1], edges[0]), torch.ones(20), accumulate=True)
    first, second = module.layers
    expected = matrix @ second(functional.relu(matrix @ first(nodes)))
    torch.testing.assert_close(module((nodes, edges)), expected)


def test_the_residual_is_the_equation_s() -> None:
    """With one layer of tanh, derivatives are written by hand: u = v tanh(w x + b) + c."""
    torch.manual_seed(0)
    module = PhysicsInformedNetwork(1, 1).double()
    hidden, output = module.layers[0], module.layers[2]
    (w_x, w_t), v = hidden.weight[0], output.weight[0, 0]
    points = torch.rand(6, 2, dtype=torch.float64)
    tanh = torch.tanh(hidden(points))
    slope = 1 - tanh**2
    u, u_x, u_t = output(tanh), v * w_x * slope, v * w_t * slope
    u_xx = -2 * v * w_x**2 * tanh * slope
    residual, _ = module((points, points))
    torch.testing.assert_close(residual, u_t + u * u_x - 0.01 / math.pi * u_xx)


def test_the_scan_of_a_state_space_is_causal() -> None:
    torch.manual_seed(0)
    module, x = SelectiveStateSpace(8, 4), torch.randn(2, 6, 8)
    changed = x.clone()
    changed[:, 4] += 1
    apart = (module(x) - module(changed)).abs().amax((0, 2))
    assert (apart > 1e-7).tolist() == [False] * 4 + [True] * 2


def test_the_order_of_points_does_not_matter() -> None:
    torch.manual_seed(0)
    module, clouds = PointNet(4).eval(), torch.randn(2, 16, 3)
    torch.testing.assert_close(module(clouds), module(clouds[:, torch.randperm(16)]))


def test_positions_are_encoded_by_octaves() -> None:
    x = torch.tensor([[0.25, -0.5, 1.0]])
    expected = [*x[0], *(math.sin(math.pi * octave * value) for value in x[0] for octave in (1, 2))]
    torch.testing.assert_close(encoded(x, 2)[0, :9], torch.tensor(expected))
    assert encoded(x, 2).shape == (1, 15)


def test_a_decoder_has_seen_the_tokens_before() -> None:
    assert shifted(torch.tensor([[3, 4, 5]])).tolist() == [[0, 3, 4]]


def test_the_contrastive_loss_is_least_on_the_diagonal() -> None:
    places = torch.arange(3)
    assert contrastive_loss(20 * torch.eye(3), places) < 1e-6
    torch.testing.assert_close(contrastive_loss(torch.zeros(3, 3), places), torch.tensor(3.0).log())
