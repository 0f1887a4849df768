"""The variants that there are."""

import subprocess
import sys
from dataclasses import replace

import pytest

from harness import variants
from harness.variants import Variant
from tests.harness.checkout import ROOT

EXPECTED = [
    "eager_fp32",
    "eager_tf32",
    "eager_amp",
    "compile_fp32",
    "compile_amp",
    "compile_reduce_overhead_amp",
    "handcaptured_fp32",
    "handcaptured_amp",
    "handcaptured_compile_fp32",
    "handcaptured_compile_amp",
    "handcaptured_compile_max_autotune_amp",
    "kitsune_dropin_fp32",
    "kitsune_dropin_amp",
    "kitsune_deferred_fp32",
    "kitsune_deferred_amp",
    "kitsune_trainstep_fp32",
    "kitsune_trainstep_amp",
    "kitsune_dropin_unfused_fp32",
    "kitsune_dropin_unfused_amp",
    "kitsune_trainstep_one_stream_fp32",
    "kitsune_trainstep_one_stream_amp",
    "kitsune_trainstep_unfused_fp32",
    "kitsune_trainstep_unfused_amp",
]


def test_names_are_those_of_stored_results() -> None:
    assert list(variants.names()) == EXPECTED
    assert all(variants.get(name).name == name for name in EXPECTED)


def test_an_unknown_name_is_answered_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"no variant 'eager_fp8'.*kitsune_trainstep_unfused_amp"):
        variants.get("eager_fp8")


@pytest.mark.parametrize("variant", variants.VARIANTS.values(), ids=lambda variant: variant.name)
def test_names_and_titles_say_the_precision(variant: Variant) -> None:
    assert variant.name.rpartition("_")[2] == variant.precision
    words = {"fp32": "float32", "tf32": "TF32", "amp": "autocast"}
    assert variant.title.rpartition(", ")[2] == words[variant.precision]


def test_kitsune_is_laid_out_as_what_is_captured_by_hand() -> None:
    for precision in ("fp32", "amp"):
        baseline = variants.get(f"handcaptured_{precision}")
        for form in ("dropin", "deferred", "dropin_unfused", "trainstep", "trainstep_one_stream", "trainstep_unfused"):
            variant = variants.get(f"kitsune_{form}_{precision}")
            assert variant.uses_channels_last("cuda") == baseline.uses_channels_last("cuda")


def test_with_its_loss_deferred_the_drop_in_loop_is_a_form_that_users_run_and_differs_in_nothing_else() -> None:
    for precision in ("fp32", "amp"):
        default, deferred = (variants.get(f"kitsune_{form}_{precision}") for form in ("dropin", "deferred"))
        assert (default.defer_loss, deferred.defer_loss) == (None, True)
        assert not deferred.is_diagnostic
        assert replace(deferred, name=default.name, title=default.title, defer_loss=None) == default


def test_one_stream_differs_from_the_default_in_nothing_else() -> None:
    for precision in ("fp32", "amp"):
        default = variants.get(f"kitsune_trainstep_{precision}")
        one_stream = variants.get(f"kitsune_trainstep_one_stream_{precision}")
        assert (default.num_streams, one_stream.num_streams) == (None, 1)
        assert one_stream.is_kitsune
        same = replace(one_stream, name=default.name, title=default.title, num_streams=None, cuda_only=None)
        assert same == default


def test_unfused_differs_from_one_stream_in_nothing_else() -> None:
    for precision in ("fp32", "amp"):
        one_stream = variants.get(f"kitsune_trainstep_one_stream_{precision}")
        unfused = variants.get(f"kitsune_trainstep_unfused_{precision}")
        assert (one_stream.enable_fusion, unfused.enable_fusion) == (None, False)
        same = replace(
            unfused,
            name=one_stream.name,
            title=one_stream.title,
            enable_fusion=None,
            cuda_only=one_stream.cuda_only,
        )
        assert same == one_stream


def test_the_unfused_drop_in_loop_does_without_what_the_unfused_whole_step_does_without() -> None:
    for precision in ("fp32", "amp"):
        loop, whole = (variants.get(f"kitsune_{form}_unfused_{precision}") for form in ("dropin", "trainstep"))
        assert (loop.family, whole.family) == ("kitsune_dropin", "kitsune_trainstep")
        assert replace(loop, name=whole.name, title=whole.title, family=whole.family) == whole


def test_with_max_autotune_what_is_captured_by_hand_differs_in_its_mode_alone() -> None:
    default, tuned = (variants.get(f"handcaptured_compile_{name}amp") for name in ("", "max_autotune_"))
    assert (default.compile_mode, tuned.compile_mode) == ("default", "max-autotune-no-cudagraphs")
    assert replace(tuned, name=default.name, title=default.title, compile_mode="default") == default


def test_on_the_cpu_float32_variants_share_eager_s_layout() -> None:
    for variant in variants.VARIANTS.values():
        assert variant.uses_channels_last("cpu") == (variant.precision == "amp")


def test_what_is_captured_by_hand_has_every_flag() -> None:
    for variant in variants.VARIANTS.values():
        if variant.family == "handcaptured":
            assert variant.fused
            assert variant.channels_last


def test_describing_them_needs_no_torch() -> None:
    script = (
        "import sys, harness.variants, harness.profiles, harness.benchmarks.training; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
