"""Every model of the zoo, in its tiny size: what it promises of module, data and losses, and that it learns."""

import copy
import dataclasses

import pytest
import torch

import models
from models.workload import tensors_of
from models.zoo import image_classifiers

ZOO = models.names(zoo=True)
NEVER_TRAINED = {
    "hubert": {"model.hubert.masked_spec_embed"},  # stands for what is masked at random, which is nothing here
    "whisper_tiny": {"model.model.encoder.embed_positions.weight"},  # sines, frozen
}


def losses(workload: models.Workload, *, steps: int, batch_size: int = 4) -> list[float]:
    """Of steps on one and the same batch."""
    optimizer = torch.optim.Adam(workload.module.parameters(), lr=workload.learning_rate)
    x, y = workload.batch(batch_size)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = workload.loss_fn(workload.module(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_there_are_many_and_none_is_called_as_another_workload() -> None:
    assert len(set(ZOO)) == len(ZOO) >= 30
    assert not set(ZOO) & set(models.names(large=True))


@pytest.mark.parametrize("name", ZOO, indirect=True)
class TestEveryModel:
    def test_module_is_float32_on_the_cpu_in_train_mode(self, name: str) -> None:
        workload = models.build(name, tiny=True)
        assert workload.name == name
        assert workload.module.training
        for parameter in workload.module.parameters():
            assert (parameter.device.type, parameter.dtype) == ("cpu", torch.float32)

    def test_it_is_small(self, name: str) -> None:
        assert sum(parameter.numel() for parameter in models.build(name, tiny=True).module.parameters()) < 200_000

    def test_it_learns_its_batch_by_steps_that_can_be_repeated(self, name: str) -> None:
        """One and the same batch three times: what is random, such as dropout, would make the runs differ."""
        workload = models.build(name, tiny=True)
        again = dataclasses.replace(workload, module=copy.deepcopy(workload.module))
        before = copy.deepcopy(dict(workload.module.named_parameters()))
        found = losses(workload, steps=5)
        assert found[-1] < found[0]
        assert losses(again, steps=5) == found
        after = dict(workload.module.named_parameters())
        still = {each for each, parameter in before.items() if torch.equal(after[each], parameter)}
        assert still == NEVER_TRAINED.get(name, set())

    def test_batches_are_functions_of_size_and_number(self, name: str) -> None:
        workload = models.build(name, tiny=True)
        rng = torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                strange = workload.batch(3, index=1)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(torch.get_rng_state(), rng)
        (x, y), (other_x, _) = workload.batch(3, index=1), workload.batch(3, index=2)
        for tensor, same in zip((*tensors_of(x), y), (*tensors_of(strange[0]), strange[1]), strict=True):
            assert (tensor.device, tensor.dtype) == (same.device, same.dtype)
            assert torch.equal(tensor, same)
            assert tensor.is_contiguous()
        assert not all(torch.equal(one, two) for one, two in zip(tensors_of(x), tensors_of(other_x), strict=True))
        for size, index in ((0, 0), (1, -1)):
            with pytest.raises(ValueError, match="must"):
                workload.batch(size, index=index)

    def test_seed_alone_decides_the_weights(self, name: str) -> None:
        first, again, other = (list(models.build(name, seed=seed, tiny=True).module.parameters()) for seed in (3, 3, 4))
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
        assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))

    def test_the_loss_is_a_float32_scalar_under_autocast_too(self, name: str) -> None:
        workload = models.build(name, tiny=True)
        x, y = workload.batch(4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = workload.loss_fn(workload.module(x), y)
        assert (loss.shape, loss.dtype) == ((), torch.float32)
        assert torch.isfinite(loss)

    def test_both_devices_have_a_size(self, name: str) -> None:
        workload = models.build(name, tiny=True)
        assert set(workload.default_batch_size) == {"cpu", "cuda"}
        assert workload.default_batch_size["cpu"] <= workload.default_batch_size["cuda"]
        assert not workload.batch_sizes


def number_of_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in models.build(name).module.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("diffusion_unet", 9_434_691),
        ("dlrm", 33_664_577),
        ("policy_value", 6_085),
        ("graph_network", 109_096),
        ("dqn", 1_687_206),
        ("mlp_mixer", 18_528_264),
        ("efficientnet_b0", 5_288_548),
        ("mobilenet_v3_large", 5_483_032),
        ("densenet121", 7_978_856),
        ("regnet_y_800mf", 6_432_512),
        pytest.param("convnext_tiny", 28_589_128, marks=pytest.mark.slow),
        pytest.param("swin_t", 28_288_354, marks=pytest.mark.slow),
        pytest.param("vit_small", 22_050_664, marks=pytest.mark.slow),
        pytest.param("t5_small", 60_506_624, marks=pytest.mark.slow),
        pytest.param("hubert", 94_571_146, marks=pytest.mark.slow),
        pytest.param("whisper_tiny", 37_760_640, marks=pytest.mark.slow),
        pytest.param("distilbert", 66_955_010, marks=pytest.mark.slow),
        pytest.param("timm_convnext_tiny", 28_589_128, marks=pytest.mark.slow),
        pytest.param("timm_mixer_b16", 59_880_472, marks=pytest.mark.slow),
        ("timm_regnety_008", 6_263_168),
        pytest.param("timm_vit_small", 22_050_664, marks=pytest.mark.slow),
    ],
    indirect=["name"],
)
def test_whole_it_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert number_of_parameters(name) == parameters


def test_without_timm_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_classifiers.importlib.util, "find_spec", lambda name: None)
    reason = "timm is not installed: install it, `pip install timm`"
    assert models.missing("timm_vit_small") == reason
    with pytest.raises(ModuleNotFoundError, match="pip install timm"):
        models.build("timm_vit_small")
