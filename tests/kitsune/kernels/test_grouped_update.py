"""Gradients of linear layers with the optimizer's step, against float64: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from kitsune.graph import dataflow
from kitsune.graph.verify import refuse_graph
from kitsune.kernels import grouped_update
from tests.kitsune.kernels.interpreter import as_laid_out, error, interpreted, normal, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

BATCH = 19
LAYERS = ((19, 21), (16, 8), (5, 16))  # outputs and inputs; the second is aligned
STEPS = 2
PRECISIONS = (torch.float64, torch.float32)
FORMS = ((16, 16, 16, 1, 4, 2), (32, 16, 32, 1, 4, 2), (16, 32, 16, 2, 8, 1), (64, 64, 16, 1, 2, 1))
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
ADAM |= {"decoupled": False, "maximize": False}
SGD: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

Machine = tuple[str, Callable[..., None], Callable[..., None]]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("adam_triton", "linear_triton", "grouped_update_triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A device, and what runs the kernels there: the launchers in the interpreter, or the compiled ones."""
    if request.param == "cpu":
        module = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
    else:
        module = pytest.importorskip("kitsune.kernels.grouped_update_triton", reason="Triton is not installed")
    return request.param, module.linear_adam, module.linear_sgd


class Layers:
    """Weights and biases of `LAYERS`, and in each step their inputs and the gradients of their outputs."""

    def __init__(self, device: str, dtype: torch.dtype, first_input: torch.dtype | None = None) -> None:
        self.device, self.dtype, self.first_input = device, dtype, first_input or dtype
        shapes = [shape for layer in LAYERS for shape in (layer, layer[:1])]
        self.parameters = [normal(shape, torch.float32, device, seed) for seed, shape in enumerate(shapes)]
        self.layers = [index // 2 for index in range(len(shapes))]

    def tensors(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        grads = [
            normal((BATCH, shape[0]), self.dtype, self.device, 100 * step + seed, 10.0 ** (seed - 1))
            for seed, shape in enumerate(LAYERS)
        ]
        xs = [
            normal((BATCH, shape[1]), self.dtype if seed else self.first_input, self.device, 100 * step + 50 + seed)
            for seed, shape in enumerate(LAYERS)
        ]
        return grads, xs

    def zeros(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros_like(parameter, dtype=dtype) for parameter in self.parameters]

    def by_torch(
        self, kind: type[torch.optim.Optimizer], precision: torch.dtype, **options: Any
    ) -> dict[str, list[Tensor]]:
        """What `torch.optim` does, with exact gradients in float64, or else with those of the plain chain."""
        parameters = [nn.Parameter(value.to(precision)) for value in self.parameters]
        optimizer = kind(parameters, foreach=True, **options)
        for step in range(1, STEPS + 1):
            plain = grouped_update._gradients(*self.tensors(step), self.layers, self.parameters)
            grads = self.exact_gradients(step) if precision == torch.float64 else plain
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        state = [optimizer.state[parameter] for parameter in parameters]
        found = {name: [one[name] for one in state] for name in state[0] if isinstance(state[0][name], Tensor)}
        found.pop("step", None)
        return {"parameters": [parameter.detach() for parameter in parameters], **found}

    def exact_gradients(self, step: int) -> list[Tensor]:
        found = []
        for grad, x in zip(*self.tensors(step), strict=True):
            found += [grad.double().t() @ x.to(self.dtype).double(), grad.double().sum(0)]
        return found


def adam(machine: Machine, layers: Layers, amsgrad: bool = False, **options: Any) -> dict[str, list[Tensor]]:
    parameters = [parameter.clone() for parameter in layers.parameters]
    state = {name: layers.zeros() for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))}
    lr, count = torch.tensor(1e-2, device=machine[0]), torch.zeros((), device=machine[0])
    grads, shadows = options.pop("grads", []), options.pop("shadows", [])
    largest = state.get("max_exp_avg_sq", [])
    for step in range(1, STEPS + 1):
        count += 1
        machine[1](
            *layers.tensors(step), layers.layers, parameters, state["exp_avg"], state["exp_avg_sq"], largest,
            [count] * len(parameters), grads, shadows, lr=lr, **{**ADAM, **options},
        )  # fmt: skip
    return {"parameters": parameters, **state}


def sgd(machine: Machine, layers: Layers, **options: Any) -> dict[str, list[Tensor]]:
    parameters = [parameter.clone() for parameter in layers.parameters]
    buffers = layers.zeros() if options.get("momentum") else []
    lr = torch.tensor(1e-2, device=machine[0])
    grads, shadows = options.pop("grads", []), options.pop("shadows", [])
    for step in range(1, STEPS + 1):
        machine[2](
            *layers.tensors(step), layers.layers, parameters, buffers, grads, shadows, lr=lr, **{**SGD, **options}
        )
    return {"parameters": parameters, **({"momentum_buffer": buffers} if buffers else {})}


def assert_as_accurate(
    found: dict[str, list[Tensor]], exact: dict[str, list[Tensor]], plain: dict[str, list[Tensor]]
) -> None:
    assert found.keys() == exact.keys()
    for name, tensors in exact.items():
        for one, other, same in zip(found[name], tensors, plain[name], strict=True):
            assert error(one, other) <= 2 * error(same, other) + torch.finfo(torch.float32).eps, name


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1, "decoupled": True}, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_is_as_accurate_as_torch(machine: Machine, dtype: torch.dtype, options: dict[str, Any]) -> None:
    layers = Layers(machine[0], dtype, first_input=torch.float32)
    found = adam(machine, layers, **options)
    shared = {"lr": 1e-2, **{key: value for key, value in options.items() if key != "decoupled"}}
    kind = torch.optim.AdamW if options.get("decoupled") else torch.optim.Adam
    exact, plain = (layers.by_torch(kind, precision, **{"weight_decay": 0.0, **shared}) for precision in PRECISIONS)
    assert_as_accurate(found, exact, plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sgd_is_as_accurate_as_torch(machine: Machine, dtype: torch.dtype, options: dict[str, Any]) -> None:
    layers = Layers(machine[0], dtype)
    found = sgd(machine, layers, **options)
    exact, plain = (layers.by_torch(torch.optim.SGD, precision, **{"lr": 1e-2, **options}) for precision in PRECISIONS)
    assert_as_accurate(found, exact, plain)


def test_dampening_is_that_of_torch_after_the_first_step(machine: Machine) -> None:
    layers = Layers(machine[0], torch.float32)
    options = {**SGD, "momentum": 0.8, "dampening": 0.3}
    states = [[[one.clone() for one in layers.parameters], [one + 1 for one in layers.zeros()]] for _ in range(2)]
    lr = torch.tensor(0.1, device=machine[0])
    machine[2](*layers.tensors(1), layers.layers, *states[0], [], [], lr=lr, **options)
    grads = [grad.float() for grad in layers.exact_gradients(1)]
    torch._fused_sgd_(states[1][0], grads, states[1][1], lr=lr, is_first_step=False, **options)
    for found, expected in zip(*states, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_writes_gradients_and_shadows(
    machine: Machine, kernels: ModuleType, form: tuple[int, ...], dtype: torch.dtype
) -> None:
    layers = Layers(machine[0], dtype)
    for update in (adam, sgd):
        grads, shadows = layers.zeros(), layers.zeros(torch.bfloat16)
        found = update(machine, layers, grads=grads, shadows=shadows, form=kernels.Form(*form))
        for grad, exact in zip(grads, layers.exact_gradients(STEPS), strict=True):
            atol = 2e-6 * exact.abs().max().item()
            torch.testing.assert_close(grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=atol)
            assert torch.equal(grad, grad.to(dtype).float())
        for shadow, parameter in zip(shadows, found["parameters"], strict=True):
            assert torch.equal(shadow, parameter.bfloat16())


@pytest.mark.slow
def test_what_may_be_left_out_changes_nothing(
    machine: Machine, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients and shadows that are not asked for, and how many parameters one launch takes."""
    layers = Layers(machine[0], torch.bfloat16)
    form = kernels.Form(*FORMS[0])  # another form may sum in another order
    expected = [update(machine, layers, form=form) for update in (adam, sgd)]
    module = machine[1].__globals__
    monkeypatch.setitem(module, "PARAMETERS_A_LAUNCH", 4)
    for update, values in zip((adam, sgd), expected, strict=True):
        found = update(machine, layers, grads=layers.zeros(), shadows=layers.zeros(torch.float16), form=form)
        for name, tensors in values.items():
            assert all(map(torch.equal, found[name], tensors)), name


def test_layers_that_are_alike_share_branches(
    machine: Machine, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether in one launch or in several, each parameter is updated as if it were alone, with its own step count."""
    shapes = [(16, 8), (16, 8), (5, 16), (16, 8)]
    parts = [
        [normal(shape, torch.float32, machine[0], 10 * kind + seed) for seed, shape in enumerate(some)]
        for kind, some in enumerate([[(BATCH, n) for n, _ in shapes], [(BATCH, k) for _, k in shapes]])
    ]
    parameters = [normal(size, torch.float32, machine[0], 20) for shape in shapes for size in (shape, shape[:1])]
    steps = [torch.tensor(float(1 + index), device=machine[0]) for index in range(len(parameters))]
    lr = torch.tensor(1e-2, device=machine[0])

    def update(chosen: Sequence[int]) -> list[list[Tensor]]:
        updated = [parameters[index].clone() for index in chosen]
        state = [updated, *([torch.zeros_like(one) for one in updated] for _ in range(2))]
        machine[1](
            *parts, [index // 2 for index in chosen], *state, [], [steps[index] for index in chosen], [], [], lr=lr,
            form=kernels.Form(*FORMS[0]), **ADAM,
        )  # fmt: skip
        return state

    alone = [update([index]) for index in range(len(parameters))]
    for most in (16, 3):
        monkeypatch.setitem(machine[1].__globals__, "PARAMETERS_A_LAUNCH", most)
        together = zip(*update(range(len(parameters))), strict=True)
        for found, expected in zip(together, alone, strict=True):
            for one, (other,) in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # compiled sums may differ in order


@pytest.mark.parametrize("update", [adam, sgd])
def test_choosing_a_form_changes_nothing(
    machine: Machine, update: Callable[..., dict[str, list[Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches the kernel on copies, also where `found_inf` forbids the update."""
    tried = []

    def try_two(key: str, forms: tuple[Any, ...], run: Callable[[Any], None], device: torch.device) -> Any:
        tried.extend(forms[:2])
        for form in forms[:2]:
            run(form)
        return forms[0]

    layers = Layers(machine[0], torch.bfloat16)
    monkeypatch.setitem(machine[1].__globals__, "choose", try_two)
    grads, shadows = layers.zeros(), layers.zeros(torch.bfloat16)
    found_inf = torch.ones((), device=machine[0])
    found = update(machine, layers, grads=grads, shadows=shadows, found_inf=found_inf)
    assert len(set(tried)) == 2
    assert all(map(torch.equal, found["parameters"], layers.parameters))
    assert not any(tensor.any() for tensor in [*grads, *shadows])


def test_forms_that_are_tried_at_the_same_time_share_whole_copies(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers("cpu", torch.float32)
    shapes: list[list[list[torch.Size]]] = []

    def try_at_the_same_time(key: str, forms: Sequence[Any], run: Callable[[Any], None], device: torch.device) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, forms[:1] * 4))

    def clone_slowly(tensor: Tensor) -> Tensor:
        time.sleep(0.005)
        return tensor.detach()

    def note(form: Any, states: list[Any], found_inf: None) -> None:
        shapes.append([[one.shape for group in groups for one in group] for groups in states])

    monkeypatch.setattr(kernels, "choose", try_at_the_same_time)
    monkeypatch.setattr(Tensor, "clone", clone_slowly)
    part = [(index,) for index in layers.layers]
    grads, xs = (kernels._grouped(tensors, part) for tensors in layers.tensors(1))
    states = [tuple((one,) for one in layers.parameters)] * 4
    kernels._fastest(kernels._linear_sgd, grads, xs, states, "", False, note)
    assert shapes == [[[one.shape for one in layers.parameters]] * 4] * 4


@pytest.mark.parametrize(
    ("dtypes", "allow_tf32", "all_forms"),
    [
        ([torch.bfloat16], False, True),
        ([torch.float32], True, True),
        ([torch.float32], False, False),
        ([torch.bfloat16, torch.float32], False, False),
    ],
)
def test_forms_that_take_long_to_compile_are_left_to_tensor_cores(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtypes: list[torch.dtype], allow_tf32: bool, all_forms: bool
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(kernels, "choose", lambda _key, forms, *_: tried.extend(forms))
    grads = tuple((torch.ones(512, 256, dtype=dtype),) for dtype in dtypes)
    states = [tuple((torch.ones(256, 256),) for _ in dtypes)]
    kernels._fastest(kernels._linear_sgd, grads, grads, states, "", allow_tf32, lambda *_: None)
    products = [form.rows * form.cols * form.depth * form.slices // (32 * form.num_warps) for form in tried]
    assert (max(products) > 1024) == all_forms
    assert len(tried) > 3


def test_of_forms_that_all_take_long_to_compile_there_is_one(kernels: ModuleType) -> None:
    assert kernels._compiled_soon(kernels._FORMS[-2:]) == kernels._FORMS[-2:-1]


@pytest.mark.parametrize("update", [adam, sgd])
def test_found_inf(machine: Machine, update: Callable[..., dict[str, list[Tensor]]]) -> None:
    layers = Layers(machine[0], torch.float32)
    grads, shadows = layers.zeros(), layers.zeros(torch.bfloat16)
    found = update(machine, layers, grads=grads, shadows=shadows, found_inf=torch.ones((), device=machine[0]))
    assert all(map(torch.equal, found["parameters"], layers.parameters))
    assert not any(tensor.any() for tensor in [*grads, *shadows])
    found = update(machine, layers, found_inf=torch.zeros((), device=machine[0]))
    assert all(map(torch.equal, found["parameters"], update(machine, layers)["parameters"]))


def test_gradients_that_are_not_finite_reach_their_elements_only(machine: Machine) -> None:
    layers = Layers(machine[0], torch.float32)
    clean, broken = layers.zeros(), layers.zeros()
    for grads, value in ((clean, 1.0), (broken, float("nan"))):
        grad_outputs, xs = layers.tensors(1)
        grad_outputs[1][3, 5] = value
        parameters = [parameter.clone() for parameter in layers.parameters]
        machine[2](
            grad_outputs, xs, layers.layers, parameters, [], grads, [], lr=torch.ones((), device=machine[0]), **SGD
        )
    for index, (one, other) in enumerate(zip(clean, broken, strict=True)):
        bad = torch.zeros_like(one, dtype=torch.bool)
        if index in (2, 3):
            bad[5] = True
        assert torch.equal(one[~bad], other[~bad])
        assert other[bad].isnan().all()


def test_layouts_and_batches(machine: Machine, kernels: ModuleType) -> None:
    """Padded rows, odd addresses, a bias alone, and an empty batch, whose gradient is zero."""
    layers = Layers(machine[0], torch.bfloat16)
    grad_outputs, xs = layers.tensors(1)
    lr = torch.ones((), device=machine[0])

    def gradients(grad_outputs: list[Tensor], xs: list[Tensor], chosen: list[int]) -> list[Tensor]:
        grads = [layers.zeros()[index] + 7 for index in chosen]
        parameters = [layers.parameters[index].clone() for index in chosen]
        machine[2](
            grad_outputs, xs, [layers.layers[index] for index in chosen], parameters, [], grads, [], lr=lr,
            form=kernels.Form(*FORMS[0]), **SGD,
        )  # fmt: skip
        return grads

    expected = gradients(grad_outputs, xs, list(range(6)))
    sliced = [[as_laid_out(tensor, "sliced") for tensor in tensors] for tensors in (grad_outputs, xs)]
    assert all(map(torch.equal, gradients(sliced[0], sliced[1], list(range(6))), expected))
    assert torch.equal(gradients(grad_outputs, xs, [3])[0], expected[3])
    empty = gradients([tensor[:0] for tensor in grad_outputs], [tensor[:0] for tensor in xs], [0, 1])
    assert not any(tensor.any() for tensor in empty)
    assert gradients(grad_outputs, xs, []) == []


# The operators


def arguments(name: str, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    layers = Layers("cpu", torch.bfloat16)
    grads, xs = layers.tensors(1)
    lists: dict[str, Any] = {"grad_outputs": grads, "inputs": xs, "layers": layers.layers}
    lists["parameters"] = layers.parameters
    states = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs") if name == "adam" else ("momentum_buffers",)
    lists |= {state: layers.zeros() for state in states}
    if name == "adam":
        lists["steps"] = [torch.ones(()) for _ in layers.parameters]
    lists |= {"grads": layers.zeros(), "shadows": layers.zeros(torch.bfloat16)}
    options = {**(ADAM if name == "adam" else {**SGD, "momentum": 0.9}), "lr": torch.tensor(0.1)}
    merged = {**lists, **options, **changes}
    return tuple(merged.pop(key) for key in lists), merged


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_operators_are_well_formed(name: str) -> None:
    lists, options = arguments(name)
    operator = getattr(torch.ops.kitsune, f"linear_{name}_").default
    torch.library.opcheck(operator, lists, options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_operators_are_single_nodes_of_a_legal_graph(name: str) -> None:
    lists, options = arguments(name)
    flat = [tensor for tensors in lists if tensors is not lists[2] for tensor in tensors]

    def update(*inputs: Tensor) -> list[Tensor]:
        given = iter(inputs)
        parts = [tensors if tensors is lists[2] else [next(given) for _ in tensors] for tensors in lists]
        operator = grouped_update.linear_adam_ if name == "adam" else grouped_update.linear_sgd_
        operator(*parts, **{**options, "lr": next(given)})
        return []

    graph = make_fx(update, tracing_mode="fake")(*flat, options["lr"]).graph
    operator = getattr(torch.ops.kitsune, f"linear_{name}_").default
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [operator]
    assert refuse_graph(graph) is None
    read = 6 if name == "adam" else 0  # steps lie between the states and the gradients
    states = 4 if name == "adam" else 2
    assert set(dataflow.written_inputs(graph)) == {
        *range(6, 6 + 6 * states),
        *range(6 + 6 * states + read, 6 + 6 * states + read + 12),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_operators_run_the_kernels(name: str) -> None:
    """And choosing a form beforehand, on copies, changes nothing."""
    lists, options = arguments(name)
    expected, _ = arguments(name)
    moved = [one if one is lists[2] else [tensor.cuda() for tensor in one] for one in lists]
    operator = grouped_update.linear_adam_ if name == "adam" else grouped_update.linear_sgd_
    operator(*moved, **{**options, "lr": options["lr"].cuda()})
    operator(*expected, **options)
    for found, tensors in zip(moved, expected, strict=True):
        for one, other in zip(found, tensors, strict=True) if found is not lists[2] else ():
            torch.testing.assert_close(one.cpu().float(), other.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("adam", {"inputs": []}, "one input a grad_output: got 0 for 3"),
        ("adam", {"layers": [0]}, "one layer a parameter: got 1 for 6"),
        ("adam", {"layers": [0, 0, 1, 1, 2, 3]}, "there are 3 layers: got 3"),
        (
            "adam",
            {"layers": [0] * 6},
            r"layer 0 has a weight of shape \(19, 21\) and a bias of \(19,\): got \(16, 8\)",
        ),
        ("adam", {"steps": [torch.ones(())]}, "one step a parameter: got 1 for 6"),
        ("adam", {"exp_avgs": []}, "one of exp_avgs a parameter: got 0 for 6"),
        ("adam", {"lr": torch.tensor(0.1).double()}, "must be float32 scalars: got torch.float64"),
        ("adam", {"found_inf": torch.ones((), device="meta")}, "there must be one device: got meta"),
        ("sgd", {"momentum_buffers": []}, "momentum needs buffers, and no momentum none"),
        ("sgd", {"momentum": 0.0}, "momentum needs buffers, and no momentum none"),
        ("sgd", {"inputs": [torch.ones(2, 3)] * 3}, r"matrices of as many rows: got \(19, 19\) and \(2, 3\)"),
        ("sgd", {"inputs": [torch.ones(19, 21).half()] * 3}, "got torch.bfloat16 and torch.float16"),
        ("sgd", {"inputs": [torch.ones(21, 19).t()] * 3}, r"rows .* must be dense: got strides \(1, 19\)"),
    ],
)
def test_what_the_operators_refuse(name: str, changes: dict[str, Any], problem: str) -> None:
    lists, options = arguments(name, **changes)
    check = grouped_update._check_adam if name == "adam" else grouped_update._check_sgd
    with pytest.raises(ValueError, match=problem):
        check(*lists, **options)


def test_shadows_and_states_that_are_laid_out_otherwise_are_refused() -> None:
    for name in ("momentum_buffers", "shadows", "grads"):
        lists, options = arguments("sgd")
        index = {"momentum_buffers": 4, "grads": 5, "shadows": 6}[name]
        lists[index][0] = as_laid_out(lists[index][0], "transposed")
        with pytest.raises(ValueError, match=f"{name} must be torch.*, contiguous and shaped like the parameters"):
            grouped_update._check_sgd(*lists, **options)
