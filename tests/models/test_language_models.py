"""BERT and GPT-2 as workloads: what is made of transformers' models, on small configurations of the same classes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import bert, gpt2
from models.synthetic_text import SyntheticDocuments, SyntheticText
from models.workload import initialization

pytest.importorskip("transformers")

LENGTH, VOCABULARY = 16, 64


def small_bert(attention: str | None = None) -> nn.Module:
    config = bert.configuration(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return built(bert.classifier, config, attention)


def small_gpt2(attention: str | None = None) -> nn.Module:
    config = gpt2.configuration(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH)
    return built(gpt2.language_model, config, attention)


def built(make: Any, config: Any, attention: str | None) -> nn.Module:
    if attention is not None:
        config._attn_implementation = attention
    with initialization(0):
        module: nn.Module = make(config)
    return module


SMALL = pytest.mark.parametrize("make", [small_bert, small_gpt2])


def tokens(rows: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH))


def test_the_output_is_the_logits_alone() -> None:
    for module, shape in ((small_bert(), (4, 2)), (small_gpt2(), (4, LENGTH, VOCABULARY))):
        logits = module(tokens())
        assert type(logits) is Tensor
        assert (logits.shape, logits.dtype, logits.requires_grad) == (shape, torch.float32, True)


@SMALL
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_that_of_transformers(make: Any, attention: str) -> None:
    x = tokens()
    torch.testing.assert_close(make()(x), make(attention)(x), rtol=1e-5, atol=1e-5)


def test_gpt2_does_not_see_the_tokens_that_it_predicts() -> None:
    module, x = small_gpt2(), tokens()
    changed = x.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCABULARY
    before, after = module(x), module(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_gpt2_s_output_layer_is_its_embedding() -> None:
    module = small_gpt2()
    output = module.get_submodule("model.lm_head").get_parameter("weight")
    assert output is module.get_submodule("model.transformer.wte").get_parameter("weight")


@SMALL
def test_training_is_deterministic(make: Any) -> None:
    module, x = make(), tokens()
    assert module.training
    assert torch.equal(module(x), module(x))
    assert all(layer.p == 0 for layer in module.modules() if isinstance(layer, nn.Dropout))


@SMALL
def test_compiled_whole_it_runs_the_kernels_that_it_runs_eagerly(make: Any) -> None:
    """transformers' own `sdpa` gives the kernels a mask while it is compiled, and none in eager mode."""
    masks: list[object] = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        masks.extend(node.kwargs["attn_mask"] for node in calls)
        return graph

    module, x = make(), tokens()
    compiled = torch.compile(module, fullgraph=True, backend=record)
    torch.testing.assert_close(compiled(x), module(x))
    assert masks == [None, None]


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    logits, targets = torch.randn(3, LENGTH, VOCABULARY), tokens(3)
    chosen = logits.log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(gpt2.next_token_loss(logits, targets), -chosen.mean())


def train(module: nn.Module, loss_fn: Any, data: Any, *, steps: int, learning_rate: float) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate)
    for index in range(steps):
        x, y = data.batch(32, index=index)
        optimizer.zero_grad()
        loss_fn(module(x), y).backward()
        optimizer.step()


def test_gpt2_learns_what_follows() -> None:
    data = SyntheticText(LENGTH, VOCABULARY, num_states=16)
    module = small_gpt2()
    train(module, gpt2.next_token_loss, data, steps=150, learning_rate=3e-3)
    x, y = data.batch(64, index=150)
    loss = gpt2.next_token_loss(module(x), y).item()
    assert math.log(4) * 0.98 < loss < math.log(4) * 1.15 < math.log(16)


def test_bert_learns_the_classes() -> None:
    data = SyntheticDocuments(LENGTH, VOCABULARY, signal=0.6)
    module = small_bert()
    x, y = data.batch(256, index=100)
    assert (module(x).argmax(1) == y).float().mean() < 0.65
    train(module, nn.CrossEntropyLoss(), data, steps=100, learning_rate=1e-3)
    assert (module(x).argmax(1) == y).float().mean() > 0.85
