"""Which tests of templates are long."""

import pytest

_STEPS = ("gpt2", "llama", "bert", "vit", "resnet18", "transformer", "dropout_does_not", "models_with", "two_layers")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Steps of whole models are long, and so is what half precision does as bfloat16 does."""
    for item in items:
        if item.path.parent.name != "fusion" or item.get_closest_marker("gpu"):
            continue
        is_step = any(word in item.name for word in _STEPS) and "resnet18[always]" not in item.name
        if is_step or "torch.float16" in item.name:
            item.add_marker(pytest.mark.slow)
