"""transformers is imported late, and its absence is named.

What happens at import happens once per process, so each case runs in a process of its own.
"""

import pytest

from tests.models.test_torchvision_loading import run


def test_its_absence_is_named() -> None:
    run("""
        import importlib.util
        import models
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "transformers" else found(name)
        assert models.missing("mlp") is None
        for name in ("bert_base", "gpt2_small"):
            reason = models.missing(name)
            assert "pip install -e '.[nlp]'" in reason
            try:
                models.build(name)
            except ModuleNotFoundError as error:
                assert (error.name, str(error)) == ("transformers", reason)
            else:
                raise AssertionError("transformers was imported")
    """)


@pytest.mark.slow
def test_only_what_needs_it_imports_it() -> None:
    pytest.importorskip("transformers")
    run("""
        import sys
        import models
        models.build("mlp")
        assert models.missing("gpt2_small") is None
        assert "transformers" not in sys.modules
        from models import gpt2
        gpt2.language_model(gpt2.configuration(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
        assert "transformers" in sys.modules
    """)


@pytest.mark.slow
def test_importing_it_leaves_global_state_alone() -> None:
    pytest.importorskip("transformers")
    run("""
        import torch
        from models.transformers_loading import attention_without_masks
        state = torch.get_rng_state()
        name = attention_without_masks()
        assert attention_without_masks() == name
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() is torch.float32
    """)
