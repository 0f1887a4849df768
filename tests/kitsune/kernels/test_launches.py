"""Every launch of a kernel: whether its arguments fit, and its forms compile for a GPU, without there being one."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kitsune import kernels
from kitsune.kernels.casts import cast_many
from kitsune.kernels.scalars import add_to_scalars_
from tests.kitsune.kernels import (
    test_adam,
    test_batch_norm,
    test_casts,
    test_conv,
    test_grouped_update,
    test_head,
    test_layer_norm,
    test_linear,
    test_pool,
    test_small_conv,
    test_vocabulary,
)
from tests.kitsune.kernels.offline import bind, choose_first, compiled, pretending

pytest.importorskip("triton", reason="Triton is not installed")

MOST_SHARED_BYTES = 227 * 1024  # of a block, for compute capability 9.0
WIDTHS = (784, 512, 256, 10)  # of an MLP
BATCH = 64


def launch_adam() -> None:
    from kitsune.kernels import adam_triton

    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"amsgrad": True, "weight_decay": 0.1, "decoupled": True}):
            run = test_adam.Run(("cpu", adam_triton.launch), test_adam.SIZES, **options)
            run.step([param.to(dtype) for param in run.params], torch.zeros(()))


def launch_conv() -> None:
    from kitsune.kernels import conv_triton

    machine = test_conv.Machine("cpu", conv_triton)
    conv_triton._num_processors = lambda _: 132  # with few, the weight's gradient is not made of parts
    for case in (test_conv.SQUARE._replace(shape=(8, 64, 8, 8)), test_conv.POINTS):
        data = test_conv.Data(case, torch.bfloat16, "cpu")
        machine.conv(data.x, data.weight, data.bias, data.padding, relu=True)
        machine.conv_input_grad(data.grad, data.weight, data.size, data.padding)
        machine.conv_weight_grad(data.grad, data.x, data.kernel, data.padding)
        mean, invstd, *_ = data.before
        options = {"momentum": 0.1, "eps": 1e-5, "relu": True}
        machine.conv_batch_norm(data.x, data.weight, data.padding, data.residual, *data.of_channels, **options)
        for y, added in ((None, None), (data.x, data.added)):
            of_norm = (data.x, y, *data.before[2:], mean, invstd)
            machine.conv_input_grad_batch_norm_backward(
                data.grad, data.weight, data.padding, *of_norm, relu=True, added_grad_y=added
            )


def launch_grouped_update() -> None:
    from kitsune.kernels import grouped_update_triton

    for dtype in (torch.float32, torch.bfloat16):
        outputs, inputs = ([torch.zeros(BATCH, width, dtype=dtype) for width in part] for part in (WIDTHS[1:], WIDTHS))
        parameters = list(nn.Sequential(*map(nn.Linear, WIDTHS, WIDTHS[1:])).parameters())
        inputs[0] = inputs[0].float()
        layers, scalar = [0, 0, 1, 1, 2, 2], torch.ones(())
        grouped_update_triton.linear_adam(
            outputs, inputs[:-1], layers, parameters, parameters, parameters, [], [scalar] * 6, [], [],
            lr=scalar, **test_grouped_update.ADAM,
        )  # fmt: skip
        grouped_update_triton.linear_sgd(
            outputs, inputs[:-1], layers, parameters, parameters, [], [],
            lr=scalar, **{**test_grouped_update.SGD, "momentum": 0.9},
        )  # fmt: skip


def launch_hand_out() -> None:
    from kitsune.kernels import hand_out_triton

    for dtype, size in ((torch.float32, ()), (torch.bfloat16, (64, 10)), (torch.float32, (256, 16))):
        hand_out_triton.hand_out(torch.zeros(size, dtype=dtype), torch.zeros((), dtype=torch.int64), 5000)


def launch_head() -> None:
    from kitsune.kernels import head_triton

    machine = test_head.Machine("cpu", head_triton)
    for dtype in (torch.float32, torch.bfloat16):
        given = test_head.operands((BATCH, WIDTHS[-1], WIDTHS[-2]), dtype)
        machine.head(*given, given[0], "relu", dtype=dtype, scale=torch.ones(()), allow_tf32=True)
        machine.head(*given, None, "none", dtype=dtype)


def launch_linear() -> None:
    from kitsune.kernels import linear_triton

    machine = test_linear.Machine("cpu", linear_triton)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = test_linear.operands((BATCH, WIDTHS[1], WIDTHS[0]), (dtype, torch.float32))
        y, _ = machine.linear(x, weight, bias, "gelu", dtype=dtype, keep_preactivation=True)
        machine.input_gradient(y, weight, x, "gelu", dtype=dtype)


def launch_layer_norm() -> None:
    from kitsune.kernels import layer_norm_triton

    machine = test_layer_norm.Machine("cpu", layer_norm_triton)
    for shape in ((333, 768), (3, 20001)):
        for mean in (True, False):
            norm = test_layer_norm.Norm(shape, torch.bfloat16, "cpu", mean)
            norm.forward(machine, norm.residual, torch.bfloat16)
            norm.backward(machine, norm.grad_total, torch.float32)


def launch_batch_norm() -> None:
    from kitsune.kernels import batch_norm_triton

    with pytest.MonkeyPatch.context() as patch:
        machine = test_batch_norm.Machine("cpu", batch_norm_triton, patch)
        for case in (test_batch_norm.SPLIT, test_batch_norm.IN_ONE):
            machine.use(case[2])
            a, b = (test_batch_norm.Norm(case, torch.bfloat16, "cpu", seed) for seed in range(2))
            options = {"momentum": 0.1, "eps": 1e-5}
            y, *of_a = machine.batch_norm(a.x, a.residual, a.weight, a.bias, *a.running(), **options, relu=True)
            machine.batch_norm_backward(a.grad_y, a.x, None, a.weight, a.bias, *of_a, relu=True)
            machine.batch_norm_residual_backward(a.grad_y, a.x, y, a.weight, *of_a)
            operands = a.x, a.weight, a.bias, *a.running(), b.x, b.weight, b.bias, *b.running()
            y, *of_both = machine.batch_norm_join(*operands, momentum_a=0.1, eps_a=0.1, momentum_b=0.1, eps_b=0.1)
            of_a, of_b = of_both[:2], of_both[2:]
            machine.batch_norm_join_backward(a.grad_y, y, a.x, a.weight, a.bias, *of_a, b.x, b.weight, b.bias, *of_b)


def launch_casts() -> None:
    from kitsune.kernels import casts_triton

    test_casts.interpreted_operator(casts_triton)([torch.zeros(5000), torch.zeros(7)], torch.bfloat16)


def launch_scalars() -> None:
    from kitsune.kernels import scalars_triton

    for dtype, count in ((torch.float32, 1), (torch.int64, 20), (torch.float32, 257)):
        scalars_triton.launch([torch.zeros((), dtype=dtype) for _ in range(count)], 1)


def launch_pool() -> None:
    from kitsune.kernels import pool_triton

    forward, backward = test_pool.interpreted_operators(pool_triton)[1:3]
    x, windows = torch.zeros(2, 7, 14, 13), test_pool.WINDOWS[1]
    y, position = forward(x, *windows, relu=True, channels_last=True)
    backward(y, position, x.shape[2:], *windows, channels_last=True)


def launch_small_conv() -> None:
    from kitsune.kernels import small_conv_triton

    operators, case = test_small_conv.interpreted_operators(small_conv_triton), test_small_conv.LENET_2
    test_small_conv.by_operators(operators, case, test_small_conv.data(case, "cpu"), torch.bfloat16, False)


def launch_vocabulary() -> None:
    from kitsune.kernels import vocabulary_triton

    machine = test_vocabulary.Machine("cpu", vocabulary_triton)
    test_vocabulary.Loss((40, 5000), torch.bfloat16, "cpu").outcome(machine, in_place=True)
    weight, indices = torch.zeros(11, 768), torch.zeros(300, dtype=torch.int64)
    found = machine.embedding(weight, indices, weight, indices)
    machine.embedding_backward(found, indices, num_embeddings=11, padding_idx=-1, dtype=torch.float32)


LAUNCHES = [
    launch_adam,
    launch_grouped_update,
    launch_hand_out,
    launch_head,
    launch_linear,
    launch_layer_norm,
    launch_batch_norm,
    launch_casts,
    launch_scalars,
    launch_pool,
    launch_small_conv,
    launch_conv,
    launch_vocabulary,
]


def launch_all() -> None:
    for launch in LAUNCHES:
        launch()


def members_of_modules() -> list[Any]:
    names = [one.name for one in pkgutil.iter_modules(kernels.__path__, "kitsune.kernels.")]
    modules = [importlib.import_module(name) for name in names if name.endswith("_triton")]
    return [one for module in modules for one in vars(module).values()]


def all_kernels() -> dict[str, Any]:
    """By their names, of which there are no two of the same."""
    from kitsune.kernels.launch_triton import Kernel

    found = {id(one): one for one in members_of_modules() if isinstance(one, Kernel)}
    named = {one.__name__: one for one in found.values()}
    assert len(named) == len(found)
    return named


def kept(launches: list[Callable[[], None]], folder: Path) -> list[bool]:
    """For each kernel that is launched: whether it was found in Triton's cache."""
    import triton

    found: list[bool] = []
    choose_first()
    triton.knobs.cache.dir = str(folder)
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    for launch in launches:
        launch()
    return found


def test_what_a_process_has_compiled_another_one_finds(tmp_path: Path) -> None:
    """Whichever comes first there."""
    first = pretending(kept, [launch_scalars, launch_adam, launch_grouped_update], tmp_path)
    assert len(first) > 3
    assert not any(first)
    assert pretending(kept, [launch_grouped_update, launch_adam, launch_scalars], tmp_path) == [True] * len(first)


def test_kernels_wait_for_those_before_them() -> None:
    """They come before those have ended. Whatever else they do first may read or overwrite what is not done yet."""
    found = all_kernels()
    assert found
    for name, kernel in found.items():
        (function,) = ast.parse(inspect.getsource(kernel.compiled.fn)).body
        assert isinstance(function, ast.FunctionDef)
        first = function.body[ast.get_docstring(function) is not None]
        assert ast.unparse(first) == "await_previous()", name


def test_all_other_functions_are_called_by_kernels() -> None:
    """Were one launched, it would not wait."""
    from triton import JITFunction

    others = [one for one in members_of_modules() if isinstance(one, JITFunction)]
    functions = [*(kernel.compiled for kernel in all_kernels().values()), *others]
    assert {one.__name__ for one in others} <= {name for one in functions for name in one.fn.__code__.co_names}


def chain(x: torch.Tensor, counter: torch.Tensor, side: torch.cuda.Stream) -> list[torch.Tensor]:
    """Kernels after one another and after ones of PyTorch, memory that is set and copied, a fork and a join."""
    halves = cast_many([x, x + 1], torch.bfloat16)
    back = cast_many(halves, torch.float32)
    counter.zero_()
    add_to_scalars_([counter], 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        more = cast_many(cast_many([back[1].clone()], torch.float16), torch.float32)
        add_to_scalars_([counter], 2)
    torch.cuda.current_stream().wait_stream(side)
    add_to_scalars_([counter], 3)
    return [*back, *cast_many([back[0] + more[0]], torch.bfloat16), counter.clone()]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [100, 10**7])
def test_in_a_graph_kernels_see_what_those_before_them_wrote(size: int) -> None:
    """Each replay has other values, so that those of the one before are none."""
    counter, side = torch.zeros((), device="cuda"), torch.cuda.Stream()
    static = torch.randn(size, device="cuda")
    chain(static, counter, side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(static, counter, side)
    for _ in range(50):
        x = torch.randn(size, device="cuda")
        static.copy_(x)
        graph.replay()
        halves = [x.bfloat16(), (x + 1).bfloat16()]
        more = halves[1].float().half().float()
        wanted = [halves[0].float(), halves[1].float(), (halves[0].float() + more).bfloat16()]
        assert all(map(torch.equal, found, [*wanted, torch.full_like(counter, 6)]))


def test_arguments_fit_all_kernels() -> None:
    """Nothing is compiled. The interpreter knows neither Triton's options nor which types it takes."""
    assert set(bind(launch_all)) == set(all_kernels())


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_forms_compile_and_fit_a_processor(launch: Callable[[], None]) -> None:
    found = compiled(launch)
    assert found
    assert max(one.shared_bytes for one in found) <= MOST_SHARED_BYTES
    for one in found:
        before = one.ptx.partition("griddepcontrol.wait")[0]
        assert not re.search(r"\b(ld|st|red|atom|cp\.async\S*)\.\S*global", before), one.name
        assert not re.search(r"\.[su]16x2", one.ptx), one.name  # see `kitsune.kernels.images.ZERO`
