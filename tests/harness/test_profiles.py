"""What the profiles measure."""

import pytest

import models
from harness import profiles, variants

LARGE = models.names(large=True)[len(models.names()) :]


@pytest.mark.parametrize("model", [*models.names(), *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_cases_are_the_sizes_that_models_name(model: str) -> None:
    reason = models.missing(model)
    if reason is not None:
        pytest.skip(reason)
    workload = models.build(model)
    for device_type, sizes in workload.batch_sizes.items():
        cases = [case for case in profiles.CASES if (case.model, case.device_type) == (model, device_type)]
        assert tuple(case.batch for case in cases) == sizes
        assert [case.batch for case in cases if case.default] == [workload.default_batch_size[device_type]]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_large_models_are_part_of_the_full_profile_alone(device_type: profiles.DeviceType) -> None:
    assert profiles.FULL_ONLY == LARGE
    full = dict.fromkeys(case.model for case in profiles.cases("full", device_type))
    assert tuple(full) == models.names(large=True)
    for profile in ("quick", "sweep"):
        assert {case.model for case in profiles.cases(profile, device_type)} == set(models.names())


def test_a_case_names_model_and_batch() -> None:
    assert profiles.Case("mlp", 64, "cpu", 100).name == "mlp-b64"


def test_the_full_profile_leaves_nothing_out() -> None:
    for device_type in ("cpu", "cuda"):
        cases = profiles.cases("full", device_type)
        assert set(profiles.cases("quick", device_type)) < set(profiles.cases("sweep", device_type)) < set(cases)
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


EARLIER = {
    *("eager_fp32", "eager_amp", "handcaptured_fp32", "handcaptured_amp"),
    *("kitsune_dropin_fp32", "kitsune_dropin_amp", "kitsune_trainstep_fp32", "kitsune_trainstep_amp"),
}


def test_the_quick_profile_on_a_gpu_measures_the_default_sizes_at_all_commits() -> None:
    defaults = [case for case in profiles.cases("quick", "cuda") if case.default]
    assert [case.name for case in defaults] == ["mlp-b64", "lenet-b64", "resnet18-b128"]
    for case in defaults:
        for variant in variants.VARIANTS.values():
            now, before = (profiles.left_out("quick", case, variant, at_head=at_head) for at_head in (True, False))
            if "max_autotune" in variant.name:
                assert now == before
                assert "too long to set up" in str(now)
                continue
            assert now is None
            assert before == (None if variant.name in EARLIER else "measured at HEAD only")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("at_head", [False, True])
def test_the_check_runs_what_earlier_commits_are_measured_in(device_type: profiles.DeviceType, at_head: bool) -> None:
    on_cpu = {"eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"}
    for case in profiles.cases("check", device_type):
        for variant in variants.VARIANTS.values():
            reason = profiles.left_out("check", case, variant, at_head=at_head)
            is_run = variant.name in (on_cpu if device_type == "cpu" else EARLIER)
            assert reason == (None if is_run else "not part of the check")


@pytest.mark.parametrize(("device_type", "default"), [("cpu", "resnet18-b4"), ("cuda", "resnet18-b128")])
def test_the_quick_profile_has_the_default_sizes_alone(device_type: profiles.DeviceType, default: str) -> None:
    assert [case.name for case in profiles.cases("quick", device_type)] == ["mlp-b64", "lenet-b64", default]


SWEEP = {
    "cpu": {"eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"},
    "cuda": {
        "eager_amp",
        "handcaptured_amp",
        "handcaptured_compile_amp",
        "kitsune_trainstep_one_stream_amp",
        "kitsune_trainstep_amp",
    },
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_sweep_measures_few_variants_at_all_sizes_of_the_small_models(device_type: profiles.DeviceType) -> None:
    cases = profiles.cases("sweep", device_type)
    assert cases == tuple(
        case for case in profiles.CASES if case.device_type == device_type and case.model in models.names()
    )
    for case in cases:
        for variant in variants.VARIANTS.values():
            for at_head in (True, False):
                reason = profiles.left_out("sweep", case, variant, at_head=at_head)
                if variant.name in SWEEP[device_type]:
                    assert reason is None
                else:
                    assert reason is not None
                    assert "the full profile measures it" in reason
                is_whole = variant.name in ("handcaptured_amp", "kitsune_trainstep_amp")
                assert profiles.needs_profile("sweep", variant, at_head=at_head) == is_whole


def test_the_peers_are_profiled_at_head_and_what_losses_need_everywhere() -> None:
    def profiled(profile: profiles.Name, *, at_head: bool) -> set[str]:
        everything = variants.VARIANTS.values()
        return {it.name for it in everything if profiles.needs_profile(profile, it, at_head=at_head)}

    users = {name for name, variant in variants.VARIANTS.items() if not variant.is_diagnostic}
    assert profiled("full", at_head=False) == set(variants.names())
    assert profiled("quick", at_head=True) == users
    assert profiled("quick", at_head=False) == {name for name in users if name.startswith(("eager_", "kitsune_"))}


def test_every_profile_has_its_effort() -> None:
    for profile in ("quick", "sweep", "full", "zoo"):
        for device_type in ("cpu", "cuda"):
            effort = profiles.effort(profile, device_type)
            assert effort.rounds >= (2 if (profile, device_type) == ("zoo", "cpu") else 3)
            assert 0 < effort.turns[0] <= effort.turns[1]
            assert effort.settle_seconds < effort.process_seconds


@pytest.mark.parametrize("model", models.names(zoo=True))
def test_the_zoo_s_cases_are_the_sizes_that_models_name(model: str) -> None:
    if models.missing(model) is not None:
        pytest.skip(str(models.missing(model)))
    sizes = models.build(model, tiny=True).default_batch_size
    cases = [case for case in profiles.ZOO if case.model == model]
    assert {case.device_type: case.batch for case in cases} == sizes
    assert {case.device_type: case.loss_steps for case in cases} == {"cpu": 5, "cuda": 20}
    assert all(case.default for case in cases)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_zoo_is_measured_by_its_own_profile_alone(device_type: profiles.DeviceType) -> None:
    assert models.names(zoo=True) == profiles.ZOO_MODELS
    cases = profiles.cases("zoo", device_type)
    assert tuple(case.model for case in cases) == models.names(zoo=True)
    for profile in ("quick", "sweep", "full"):
        assert set(cases).isdisjoint(profiles.cases(profile, device_type))
    for variant in variants.VARIANTS.values():
        reason = profiles.left_out("zoo", cases[0], variant, at_head=True)
        is_measured = variant.name in profiles.ZOO_VARIANTS[device_type]
        assert reason == (None if is_measured else "not part of the zoo's profile")
        assert profiles.needs_profile("zoo", variant, at_head=False)
    assert not profiles.needs_second_setup("zoo", at_head=True)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_in_the_zoo_all_forms_of_kitsune_stand_beside_eager_in_one_precision(device_type: str) -> None:
    chosen = [variants.get(name) for name in profiles.ZOO_VARIANTS[device_type]]
    assert {variant.family for variant in chosen if variant.is_kitsune} == {"kitsune_dropin", "kitsune_trainstep"}
    assert len([variant for variant in chosen if variant.is_kitsune]) == 3
    assert len({variant.precision for variant in chosen}) == 1
    assert chosen[0].family == "eager"
    assert device_type == "cuda" or not any(variant.cuda_only for variant in chosen)


def test_models_choose_cases_of_the_profile() -> None:
    assert profiles.cases_of_models("zoo", "cuda", ["clip", "dlrm"]) == ("dlrm-b2048", "clip-b64")
    assert profiles.cases_of_models("zoo", "cpu", ["dlrm"]) == ("dlrm-b64",)
    assert profiles.cases_of_models("sweep", "cpu", ["mlp"]) == ("mlp-b16", "mlp-b64", "mlp-b256")
    own = [profiles.Case("mine", 4, "cpu", 30, default=True)]
    assert profiles.cases_of_models("quick", "cpu", ["mine"], own) == ("mine-b4",)
    with pytest.raises(ValueError, match="the quick profile has no model 'dlrm' here; it has mlp, lenet, resnet18"):
        profiles.cases_of_models("quick", "cpu", ["dlrm"])


def test_a_case_of_the_zoo_can_be_named_in_any_profile() -> None:
    selection = profiles.Selection(("dlrm-b2048",))
    profiles.check_selection(selection)
    assert [case.model for case in profiles.selected_cases("quick", "cuda", selection)] == ["dlrm"]
