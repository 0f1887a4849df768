from harness import names
from harness.variants import VARIANTS


def test_every_variant_has_a_label_without_its_precision() -> None:
    assert {names.label(variant) for variant in VARIANTS if variant.endswith("_amp")} >= {"Kitsune TrainStep", "eager"}
    for variant in VARIANTS:
        assert names.label(variant) not in ("", variant)
        assert "float32" not in names.label(variant)


def test_names_agree_with_the_catalogue() -> None:
    for name, variant in VARIANTS.items():
        assert names.precision_of(name) == variant.precision
        assert names.is_kitsune(name) == variant.is_kitsune


def test_variants_are_ordered_by_precision_and_kitsune_comes_last() -> None:
    ordered = sorted([*VARIANTS, "mine_fp8"], key=names.order)
    assert [names.precision_of(name) for name in ordered] == ["fp32"] * 10 + ["tf32"] + ["amp"] * 12 + ["fp8"]
    assert [names.is_kitsune(name) for name in ordered[:10]] == [False] * 4 + [True] * 6
    assert [names.is_product(name) for name in ordered[:10]] == [False] * 4 + [True] * 2 + [False, True] + [False] * 2


def test_kitsune_with_something_switched_off_is_no_form_that_users_run() -> None:
    without = {name for name in VARIANTS if "one_stream" in name or "unfused" in name}
    assert {name for name in VARIANTS if names.is_diagnostic(name)} == without
    assert {name for name in VARIANTS if names.is_product(name)} == set(filter(names.is_kitsune, VARIANTS)) - without
    assert names.is_product("kitsune_mine_fp32")
    assert not names.is_product("mine_fp32")
    assert not names.is_diagnostic("mine_fp32")


def test_a_variant_of_ones_own_is_called_by_its_name() -> None:
    assert names.label("mine_fp8") == "mine_fp8"
    assert names.reference_of("mine_fp8") == "eager_fp8"
    assert not names.is_kitsune("mine_fp8")
