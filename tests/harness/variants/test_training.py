"""Trainings: all variants start alike and take the same batches."""

import dataclasses
import json

import pytest
import torch

import kitsune
import models
from harness import variants
from harness.replay_plans import ReplayPlan
from harness.variants.availability import unavailable
from harness.variants.building import start
from harness.variants.kitsune import DropInTraining
from harness.variants.training import Training, _batches, _drawn, ingredients, prepare

CPU = torch.device("cpu")
HERE = [variant for variant in variants.VARIANTS.values() if variant.cuda_only is None and variant.compile_mode is None]


def training(name: str, model: str = "mlp", batch: int = 8, device: torch.device = CPU) -> Training:
    variant = variants.get(name)
    reason = unavailable(variant, device, None)
    if reason is not None:
        pytest.skip(reason)
    return start(variant, prepare(variant, model, batch, device))


def losses(name: str, steps: int, model: str = "mlp", device: torch.device = CPU) -> list[float]:
    ready = training(name, model, device=device)
    return [ready.run(1).clone().item() for _ in range(steps)]


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("name", [variant.name for variant in HERE if variant.precision == "fp32"])
def test_float32_variants_train_as_eager_does(name: str, model: str) -> None:
    expected = torch.tensor(losses("eager_fp32", 12, model))
    torch.testing.assert_close(torch.tensor(losses(name, 12, model)), expected, rtol=1e-4, atol=1e-5)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("name", [variant.name for variant in HERE if variant.precision == "amp"])
def test_autocast_variants_train_as_eager_autocast_does(name: str) -> None:
    expected = torch.tensor(losses("eager_amp", 12))
    torch.testing.assert_close(torch.tensor(losses(name, 12)), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [variant.name for variant in HERE if variant.precision == "amp"])
def test_modules_may_be_given_several_tensors(name: str) -> None:
    variant = variants.get(name)
    found = ingredients(variant, models.build("diffusion_unet", tiny=True), 2, CPU)
    x, _ = found.batches[0]
    assert isinstance(x, tuple)
    images, steps = x
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (steps.shape, steps.dtype) == ((2,), torch.int64)
    assert torch.isfinite(start(variant, found).run(2))


def test_what_is_drawn_for_a_gpu_is_drawn_once_and_every_variant_has_its_own() -> None:
    """On torch's device without memory, so that it needs none."""
    meta = torch.device("meta")
    _drawn.cache_clear()
    found = [_batches(models.build("dlrm", tiny=True), 4, meta) for _ in range(2)]
    assert (_drawn.cache_info().misses, _drawn.cache_info().hits) == (1, 1)
    assert len(found[0]) == len(found[1]) == 8
    (x, y), (other_x, other_y) = found[0][0], found[1][0]
    assert [tensor.shape for tensor in x] == [tensor.shape for tensor in other_x] == [(4, 13), (4, 4)]
    assert y.device == meta
    assert y is not other_y
    own = dataclasses.replace(models.build("dlrm", tiny=True), name="mine")
    _batches(own, 4, meta)
    assert (_drawn.cache_info().misses, _drawn.cache_info().hits) == (1, 1)


@pytest.mark.gpu
def test_several_tensors_can_be_captured_by_hand() -> None:
    found = {}
    for name in ("eager_fp32", "handcaptured_fp32"):
        variant = variants.get(name)
        workload = models.build("diffusion_unet", tiny=True)
        ready = start(variant, ingredients(variant, workload, 2, torch.device("cuda")))
        found[name] = torch.stack([ready.run(1).clone() for _ in range(12)])
    torch.testing.assert_close(found["handcaptured_fp32"], found["eager_fp32"], rtol=5e-2, atol=5e-2)


def test_only_the_loops_that_are_no_defaults_say_so() -> None:
    for precision in ("fp32", "amp"):
        for form, expected in (
            ("dropin", kitsune.Config(setup_share=1.0)),
            ("deferred", kitsune.Config(setup_share=1.0, defer_loss=True)),
            ("dropin_unfused", kitsune.Config(setup_share=1.0, num_streams=1, enable_fusion=False)),
        ):
            variant = variants.get(f"kitsune_{form}_{precision}")
            loop = start(variant, prepare(variant, "mlp", 2, CPU))
            assert isinstance(loop, DropInTraining)
            assert loop._kitsune.config == expected


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_the_loop_that_defers_its_loss_replays_it(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    covered = {}
    for form in ("dropin", "deferred"):
        ready = training(f"kitsune_{form}_{precision}")
        ready.run(8)
        status = ready.status()
        assert status is not None
        covered[form] = status["covered"]
    assert covered == {
        "dropin": ["forward", "backward", "update"],
        "deferred": ["forward", "loss", "backward", "update"],
    }


def test_only_the_whole_steps_that_do_without_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(kitsune, "TrainStep", lambda *arguments, **options: given.append(options))
    for precision in ("fp32", "amp"):
        for form in ("trainstep", "trainstep_one_stream", "trainstep_unfused"):
            variant = variants.get(f"kitsune_{form}_{precision}")
            start(variant, prepare(variant, "mlp", 2, CPU))
    assert given == [
        {"enable_amp": False, "setup_share": 1.0},
        {"enable_amp": False, "setup_share": 1.0, "num_streams": 1},
        {"enable_amp": False, "setup_share": 1.0, "num_streams": 1, "enable_fusion": False},
        {"enable_amp": True, "setup_share": 1.0},
        {"enable_amp": True, "setup_share": 1.0, "num_streams": 1},
        {"enable_amp": True, "setup_share": 1.0, "num_streams": 1, "enable_fusion": False},
    ]


def test_the_plan_comes_with_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    ready = training("kitsune_trainstep_fp32")
    ready.run(5)
    status = ready.status()
    assert status is not None
    plan = kitsune.Plan.from_json(json.dumps(status["plan"]))
    assert plan.measured_spans is not None
    assert len(plan.measured_spans) == len(plan.graph.tasks)


def test_a_kitsune_that_cannot_time_tasks_has_a_status_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: kitsune.TrainStep, *args: object) -> None:
        raise kitsune.KitsuneError("too little memory")

    monkeypatch.setenv("KITSUNE_MODE", "replay")
    for plan in (refuse, lambda step: None, lambda step, *args: None):
        monkeypatch.setattr(kitsune.TrainStep, "plan", plan)
        ready = training("kitsune_trainstep_fp32")
        ready.run(5)
        status = ready.status()
        assert status is not None
        assert status["mode"] == "replay"


@pytest.mark.parametrize("name", ["kitsune_trainstep_fp32", "kitsune_trainstep_one_stream_fp32"])
def test_the_plan_in_use_is_told_without_measuring_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: kitsune.TrainStep, *args: object) -> None:
        raise AssertionError("this takes time")

    monkeypatch.setenv("KITSUNE_MODE", "replay")
    monkeypatch.setattr(kitsune.TrainStep, "plan", refuse)
    variant = variants.get(name)
    ready = start(variant, prepare(variant, "mlp", 8, CPU))
    assert ready.plan_in_use() is None
    ready.run(5)
    assert ready.mode_in_use() == "replay"
    assert ready.plan_in_use() == ReplayPlan("in order", 1, fused=False)


@pytest.mark.parametrize("mode", ["replay", "eager"])
def test_kitsune_tells_whether_it_has_replayed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", mode)
    for name in ("kitsune_dropin_fp32", "kitsune_deferred_fp32", "kitsune_trainstep_fp32", "eager_fp32"):
        ready = training(name)
        assert not ready.has_replayed
        ready.run(5)
        assert ready.has_replayed == (mode == "replay" and name != "eager_fp32")


def test_what_replays_by_no_plan_tells_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    for name in ("eager_fp32", "kitsune_dropin_fp32"):
        ready = training(name)
        ready.run(5)
        assert ready.plan_in_use() is None
        assert ready.mode_in_use() == (None if name == "eager_fp32" else "replay")


def test_a_run_of_many_steps_is_many_runs_of_one() -> None:
    whole, single = training("eager_fp32"), training("eager_fp32")
    last = whole.run(11).item()
    assert [single.run(1).item() for _ in range(11)][-1] == last


def test_batches_rotate() -> None:
    ingredients = prepare(variants.get("eager_fp32"), "mlp", 2, CPU)
    ready = start(variants.get("eager_fp32"), ingredients)
    taken = [id(x) for x, _ in ready._take(2 * len(ingredients.batches))]
    assert taken == 2 * [id(x) for x, _ in ingredients.batches]
    assert len(set(taken)) > 1


def test_convolutional_models_are_laid_out_as_the_variant_says() -> None:
    for name, expected in (("eager_fp32", False), ("eager_amp", True)):
        ingredients = prepare(variants.get(name), "lenet", 2, CPU)
        weight = next(parameter for parameter in ingredients.model.parameters() if parameter.dim() == 4)
        assert weight.is_contiguous(memory_format=torch.channels_last)  # one input channel: both at once
        second = [parameter for parameter in ingredients.model.parameters() if parameter.dim() == 4][1]
        assert second.is_contiguous(memory_format=torch.channels_last) == expected


def test_each_variant_has_memory_of_its_own() -> None:
    first, second = (prepare(variants.get("eager_fp32"), "mlp", 2, CPU) for _ in range(2))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_the_precision_of_matrix_products_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    variant = variants.get("eager_tf32")
    start(variant, prepare(variant, "mlp", 2, CPU)).run(1)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("name", [name for name in variants.names() if name.startswith("handcaptured")])
def test_what_is_captured_by_hand_trains_as_eager_does(name: str, model: str) -> None:
    device = torch.device("cuda")
    expected = torch.tensor(losses(f"eager_{variants.get(name).precision}", 12, model, device))
    torch.testing.assert_close(torch.tensor(losses(name, 12, model, device)), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
def test_a_capture_settles_after_its_warm_up() -> None:
    ready = training("handcaptured_fp32", device=torch.device("cuda"))
    ready.run(3)
    assert not ready.settled
    ready.run(1)
    assert ready.settled
