"""Every workload: what it promises about its module, its sizes and the global state, and that it learns."""

import copy

import pytest
import torch

import models
from models import bert, gpt2
from models.mlp import MLP
from models.workload import map_tensors, tensors_of

LARGE = models.names(large=True)[len(models.names()) :]
EVERY = [*models.names(), *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]


def state(module: torch.nn.Module) -> list[torch.Tensor]:
    return list(module.state_dict().values())


def train(workload: models.Workload, *, steps: int, batch_size: int) -> None:
    optimizer = torch.optim.Adam(workload.module.parameters(), lr=workload.learning_rate)
    workload.module.train()
    for index in range(steps):
        x, y = workload.batch(batch_size, index=index)
        optimizer.zero_grad()
        workload.loss_fn(workload.module(x), y).backward()
        optimizer.step()


def accuracy(workload: models.Workload, *, index: int) -> float:
    workload.module.eval()
    x, y = workload.batch(512, index=index)
    with torch.no_grad():
        predictions: torch.Tensor = workload.module(x).argmax(1)
    return (predictions == y).float().mean().item()


def test_names_are_the_choices() -> None:
    assert models.names() == ("mlp", "lenet", "resnet18")
    assert models.names(large=True) == (*models.names(), "resnet50", "vit_b_16", "bert_base", "gpt2_small")
    for function in (models.build, models.missing):
        with pytest.raises(ValueError, match=r"no model 'vgg'; choose one of: mlp, lenet, .*, gpt2_small, .*, dlrm"):
            function("vgg")


def test_one_size_alone_is_not_tiny() -> None:
    with pytest.raises(ValueError, match=r"'lenet' has one size; .* of the zoo alone: diffusion_unet, dlrm"):
        models.build("lenet", tiny=True)


@pytest.mark.parametrize("name", EVERY, indirect=True)
class TestEveryWorkload:
    def test_module_is_float32_on_the_cpu_in_train_mode(self, name: str) -> None:
        workload = models.build(name)
        assert workload.name == name
        assert workload.module.training
        for tensor in state(workload.module):
            assert tensor.device.type == "cpu"
            assert tensor.dtype in (torch.float32, torch.int64)

    def test_seed_alone_decides_the_weights(self, name: str) -> None:
        first = state(models.build(name, seed=3).module)
        torch.rand(7)
        for again, tensor in zip(state(models.build(name, seed=3).module), first, strict=True):
            assert torch.equal(again, tensor)
        other = state(models.build(name, seed=4).module)
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

    def test_global_state_is_left_alone(self, name: str) -> None:
        reference = models.build(name)
        expected_x, _ = reference.batch(2)
        rng = torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                workload = models.build(name)
                x, _ = workload.batch(2)
            assert torch.get_default_dtype() is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(torch.get_rng_state(), rng)
        assert (x.device, x.dtype) == (expected_x.device, expected_x.dtype)
        assert torch.equal(x, expected_x)
        for tensor, expected in zip(state(workload.module), state(reference.module), strict=True):
            assert torch.equal(tensor, expected)

    def test_two_steps_move_every_parameter(self, name: str) -> None:
        """One would not: the output layer of torchvision's ViT begins with zeros."""
        workload = models.build(name)
        before = copy.deepcopy(list(workload.module.parameters()))
        train(workload, steps=2, batch_size=workload.default_batch_size["cpu"])
        for parameter, old in zip(workload.module.parameters(), before, strict=True):
            assert torch.isfinite(parameter).all()
            assert not torch.equal(parameter, old)

    def test_sizes_are_a_sweep_around_the_default(self, name: str) -> None:
        workload = models.build(name)
        assert set(workload.batch_sizes) == set(workload.default_batch_size) == {"cpu", "cuda"}
        for device_type, sizes in workload.batch_sizes.items():
            assert list(sizes) == sorted(set(sizes))
            assert workload.default_batch_size[device_type] in sizes


def number_of_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlp", 535_818),
        ("lenet", 61_706),
        ("resnet18", 11_173_962),
        ("resnet50", 25_557_032),
        ("vit_b_16", 86_567_656),
    ],
    indirect=["name"],
)
def test_architecture_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert number_of_parameters(models.build(name).module) == parameters


def test_language_models_have_the_published_number_of_parameters() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        assert number_of_parameters(bert.classifier(bert.configuration())) == 109_483_778
        assert number_of_parameters(gpt2.language_model(gpt2.configuration())) == 124_439_808


def test_resnet_has_the_cifar_stem() -> None:
    module = models.build("resnet18").module
    stem = module.get_submodule("conv1")
    assert isinstance(stem, torch.nn.Conv2d)
    assert (stem.kernel_size, stem.stride, stem.padding, stem.bias) == ((3, 3), (1, 1), (1, 1), None)
    features = torch.nn.Sequential(*list(module.children())[:-2])
    assert features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


def test_what_a_module_is_given_can_be_changed_whether_it_is_one_tensor_or_several() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    assert tensors_of(one) == (one,)
    assert tensors_of((one, two)) == (one, two)
    assert torch.equal(tensors_of(map_tensors(torch.neg, one))[0], -one)
    changed = map_tensors(lambda tensor: tensor + 1, (one, two))
    assert [tensor.tolist() for tensor in tensors_of(changed)] == [[2, 2], [1, 1, 1]]


def test_mlp_takes_other_sizes() -> None:
    assert MLP((8, 4, 2))(torch.zeros(3, 2, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "steps", "batch_size"),
    [("mlp", 60, 64), ("lenet", 150, 64), pytest.param("resnet18", 100, 16, marks=pytest.mark.slow)],
)
def test_learns_the_classes(name: str, steps: int, batch_size: int) -> None:
    chance = 0.1
    workload = models.build(name)
    assert accuracy(workload, index=steps) < 2 * chance
    train(workload, steps=steps, batch_size=batch_size)
    assert accuracy(workload, index=steps) > 3 * chance
