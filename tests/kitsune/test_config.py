"""Options: what they accept, what they become, and what an error about them says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kitsune
from kitsune.config import Config, option_names
from kitsune.errors import ConfigError, KitsuneError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in option_names():
        monkeypatch.delenv(f"KITSUNE_{name.upper()}", raising=False)


def test_defaults_change_nothing() -> None:
    config = Config()
    assert config.mode == "auto"
    assert not config.enable_amp
    assert not config.compile
    assert config.max_memory is None
    assert config.not_in_effect(uses_streams=True, can_fuse=True) == ()


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().mode = "eager"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("mode", "replay", "replay"),
        ("enable_amp", True, True),
        ("enable_amp", "1", True),
        ("enable_amp", "False", False),
        ("amp_dtype", torch.float16, torch.float16),
        ("amp_dtype", "bfloat16", torch.bfloat16),
        ("compile", True, True),
        ("cuda_graphs", "0", False),
        ("max_memory", 4096, 4096),
        ("max_memory", "4096", 4096),
        ("max_memory", "2GB", 2 * 2**30),
        ("max_memory", "512 MiB", 512 * 2**20),
        ("max_memory", "1.5k", 1536),
        ("max_memory", "1TB", 2**40),
        ("max_memory", None, None),
        ("max_graphs", 1, 1),
        ("max_graphs", "3", 3),
        ("max_graphs", np.int64(3), 3),
        ("num_streams", 8, 8),
        ("num_streams", None, None),
        ("enable_fusion", False, False),
        ("enable_fusion", None, None),
        ("setup_share", 0.25, 0.25),
        ("setup_share", "0.5", 0.5),
        ("setup_share", 1, 1.0),
        ("setup_share", None, None),
    ],
)
def test_values_that_are_allowed(name: str, given: object, value: object) -> None:
    config = Config.from_options({name: given})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    assert Config(**{name: given}) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"),
        ("mode", None),
        ("mode", True),
        ("mode", []),
        ("enable_amp", 1),
        ("enable_amp", "yes"),
        ("enable_amp", None),
        ("amp_dtype", torch.float32),
        ("amp_dtype", "fp16"),
        ("amp_dtype", 16),
        ("compile", "sometimes"),
        ("max_memory", 0),
        ("max_memory", "0"),
        ("max_memory", "0.1"),
        ("max_memory", -1),
        ("max_memory", "many"),
        ("max_memory", "2 GiBs"),
        ("max_memory", "-1GB"),
        ("max_memory", 1.5),
        ("max_memory", True),
        ("max_graphs", 0),
        ("max_graphs", None),
        ("max_graphs", 2.0),
        ("num_streams", 0),
        ("num_streams", 9),
        ("num_streams", "two"),
        ("num_streams", False),
        ("enable_fusion", 2),
        ("setup_share", 0),
        ("setup_share", 1.5),
        ("setup_share", "half"),
        ("setup_share", "nan"),
        ("setup_share", True),
    ],
)
def test_values_that_are_not_allowed(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_options({name: value})
    error = caught.value
    assert (error.option, error.value) == (name, value)
    assert f"{name!r} got {value!r}" in str(error)
    assert f"allowed: {error.allowed}" in str(error)
    assert isinstance(error, ValueError)
    assert isinstance(error, KitsuneError)


def test_an_unknown_option_is_named_beside_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'num_stream'.*enable_amp.*max_graphs.*num_streams"):
        Config.from_options({"num_stream": 2})


def test_contradictions() -> None:
    with pytest.raises(ConfigError, match=r"compile.*mode='eager'"):
        Config(mode="eager", compile=True)
    with pytest.raises(ConfigError, match=r"compile.*mode='eager'"):
        Config.from_options({"mode": "eager"}, Config(compile=True))


def test_options_take_precedence_over_a_config() -> None:
    base = Config(mode="replay", num_streams=2, enable_amp=True)
    config = Config.from_options({"mode": "auto", "num_streams": None}, base)
    assert config == Config(mode="auto", enable_amp=True)
    assert base.mode == "replay"


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "eager")
    monkeypatch.setenv("KITSUNE_ENABLE_AMP", "true")
    monkeypatch.setenv("KITSUNE_MAX_MEMORY", "1GB")
    monkeypatch.setenv("KITSUNE_NUM_STREAMS", "")
    config = Config.from_options({"mode": "replay"})
    assert (config.mode, config.enable_amp, config.max_memory) == ("replay", True, 2**30)
    assert config.num_streams is None
    assert Config.from_options({}).mode == "eager"


def test_a_misspelt_variable_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KITSUNE_ENABLE_FUSON", "0")
    monkeypatch.setenv("KITSUNE_CACHE_DIR", "/nowhere")
    monkeypatch.setenv("KITSUNE_MODE", "")
    monkeypatch.setenv("KITSUNE_URL", "https://example.org")
    monkeypatch.setenv("OTHER_KITSUNE_MODE", "eager")
    assert Config.from_options({}) == Config.from_options({}) == Config()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "KITSUNE_ENABLE_FUSON is no option" in record.message
    assert "did you mean KITSUNE_ENABLE_FUSION?" in record.message


def test_a_wrong_value_in_the_environment_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MAX_GRAPHS", "lots")
    with pytest.raises(ConfigError, match=r"max_graphs.*lots"):
        Config.from_options({})


def test_the_environment_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "eager")
    model = torch.nn.Linear(2, 2)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    assert optimizer.config.mode == "eager"


def test_a_config_object_does_not_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "eager")
    assert Config(enable_amp=True).mode == "auto"


def test_options_that_are_not_in_effect() -> None:
    config = Config(num_streams=4, enable_fusion=True)
    assert set(config.not_in_effect(uses_streams=False, can_fuse=False)) == {"num_streams", "enable_fusion"}
    assert config.not_in_effect(uses_streams=True, can_fuse=False) == ("enable_fusion",)
    assert config.not_in_effect(uses_streams=True, can_fuse=True) == ()
    assert config.max_streams() == 4
    assert Config(enable_fusion=False).not_in_effect(uses_streams=False, can_fuse=False) == ()
    live = Config(num_streams=4, cuda_graphs=False)
    assert live.not_in_effect(uses_streams=True, can_fuse=True) == ()
    assert live.not_in_effect(uses_streams=True, can_fuse=True, is_loop=True) == ("num_streams",)
    assert live.not_in_effect(uses_streams=False, can_fuse=False) == ("num_streams", "cuda_graphs")
    assert Config(defer_loss=True).not_in_effect(uses_streams=True, can_fuse=True) == ("defer_loss",)
    assert Config(defer_loss=True).not_in_effect(uses_streams=False, can_fuse=False, is_loop=True) == ()


@pytest.mark.parametrize("options", [{"mode": "replay"}, {"compile": True}])
def test_where_nothing_is_measured_nothing_is_fused(options: dict[str, Any]) -> None:
    assert Config(enable_fusion=True).fuses()
    assert Config().fuses()
    assert not Config(enable_fusion=False).fuses()
    config = Config(enable_fusion=True, **options)
    assert not config.fuses()
    assert config.not_in_effect(uses_streams=True, can_fuse=True) == ("enable_fusion",)


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"num_streams": 4, "mode": "replay"}, True),
        ({"num_streams": 4, "compile": True}, True),
        ({"num_streams": 1, "mode": "replay"}, False),
        ({"num_streams": None, "mode": "replay"}, False),
    ],
)
def test_where_nothing_is_measured_one_stream_is_used(options: dict[str, Any], ignored: bool) -> None:
    config = Config(**options)
    assert config.max_streams() == 1
    assert config.not_in_effect(uses_streams=True, can_fuse=True) == (("num_streams",) if ignored else ())


def units() -> Iterator[tuple[str, int]]:
    for exponent, letter in enumerate(("", "k", "M", "g", "T")):
        for suffix in ("", "B", "iB"):
            yield letter + suffix, 1024**exponent


@given(st.integers(1, 10**6), st.sampled_from(list(units())), st.sampled_from(["", " ", "  "]))
def test_amounts_of_memory(number: int, unit: tuple[str, int], space: str) -> None:
    assert Config(max_memory=f"{number}{space}{unit[0]}").max_memory == number * unit[1]  # type: ignore[arg-type]
