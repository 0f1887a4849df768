"""What the profiles measure."""

import pytest

import models
from harness import profiles, variants


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("model", models.names())
def test_cases_are_the_sizes_that_models_name(model: str, device_type: profiles.DeviceType) -> None:
    workload = models.build(model)
    cases = [case for case in profiles.CASES if (case.model, case.device_type) == (model, device_type)]
    assert tuple(case.batch for case in cases) == workload.batch_sizes[device_type]
    assert [case.batch for case in cases if case.default] == [workload.default_batch_size[device_type]]


def test_a_case_names_model_and_batch() -> None:
    assert profiles.Case("mlp", 64, "cpu", 100).name == "mlp-b64"


def test_the_full_profile_leaves_nothing_out() -> None:
    for device_type in ("cpu", "cuda"):
        cases = profiles.cases("full", device_type)
        assert {case.name for case in profiles.cases("quick", device_type)} < {case.name for case in cases}
        for case in cases:
            for variant in variants.VARIANTS.values():
                assert profiles.left_out("full", case, variant, at_head=False) is None


def measured(model: str, *, at_head: bool) -> set[str]:
    (case,) = [case for case in profiles.cases("quick", "cpu") if case.model == model]
    everything = variants.VARIANTS.values()
    return {variant.name for variant in everything if not profiles.left_out("quick", case, variant, at_head=at_head)}


def test_the_quick_profile_on_the_cpu_compiles_one_model_once() -> None:
    always = {"eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"}
    assert measured("mlp", at_head=True) == always | {"compile_fp32"}
    assert measured("mlp", at_head=False) == always
    assert measured("lenet", at_head=True) == measured("resnet18", at_head=True) == always


def test_the_quick_profile_on_a_gpu_measures_every_variant() -> None:
    for case in profiles.cases("quick", "cuda"):
        for variant in variants.VARIANTS.values():
            assert profiles.left_out("quick", case, variant, at_head=False) is None


def test_the_peers_are_profiled_at_head_and_what_losses_need_everywhere() -> None:
    def profiled(profile: profiles.Name, *, at_head: bool) -> set[str]:
        everything = variants.VARIANTS.values()
        return {it.name for it in everything if profiles.needs_profile(profile, it, at_head=at_head)}

    assert profiled("quick", at_head=True) == profiled("full", at_head=False) == set(variants.names())
    assert profiled("quick", at_head=False) == {
        name for name in variants.names() if name.startswith(("eager_", "kitsune_"))
    }


def test_every_profile_has_its_effort() -> None:
    for profile in ("quick", "full"):
        for device_type in ("cpu", "cuda"):
            effort = profiles.effort(profile, device_type)
            assert effort.rounds >= 3
            assert 0 < effort.turns[0] <= effort.turns[1]
            assert effort.settle_seconds < effort.process_seconds
