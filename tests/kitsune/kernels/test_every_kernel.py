"""That every kernel is run in every form, that what is wrong is noticed, and that Compute Sanitizer finds nothing."""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kitsune import kernels
from tests.kitsune.kernels import every_kernel
from tests.kitsune.kernels.calls import Call, all_calls, call, hand_out, overload, shifted
from tests.kitsune.kernels.every_kernel import Forms, check, chosen_by, error_of, largest_error, main, placed, run
from tests.kitsune.kernels.offline import bind
from tests.kitsune.kernels.test_launches import all_kernels

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
CAST = call("cast_many", [shifted(torch.arange(6.0).reshape(2, 3)), torch.ones(4)], torch.bfloat16)
ADD = call("add_to_scalars_", [torch.tensor(3.0)], 2)


def by_reference(one: Call) -> Any:
    return overload(one.operator)(*one.arguments, **one.options)


def launch_all_calls() -> None:
    """Where there is no GPU: see `bind`."""
    torch.cuda.device = lambda _: nullcontext()  # type: ignore[assignment, misc]
    for one in all_calls():
        every_kernel.launch(placed(one, "cpu"))


def test_every_operator_with_a_kernel_is_called() -> None:
    for module in pkgutil.iter_modules(kernels.__path__, "kitsune.kernels."):
        if not module.name.endswith(("_triton", "inductor")):  # those define no operators, and need Triton
            importlib.import_module(module.name)
    operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("kitsune::")]
    with_kernel = {name for name in operators if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")}
    assert with_kernel
    assert {one.operator for one in all_calls()} == with_kernel | {one.operator for one in hand_out()}


def test_every_kernel_is_launched() -> None:
    """In all forms, whose arguments fit. Nothing is compiled."""
    pytest.importorskip("triton", reason="Triton is not installed")
    assert set(bind(launch_all_calls)) == set(all_kernels())


def test_no_kernel_chooses_its_form_by_itself() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    names = [one.name for one in pkgutil.iter_modules(kernels.__path__, "kitsune.kernels.")]
    users = [module for name in names if hasattr(module := importlib.import_module(name), "choose")]
    users.remove(every_kernel.tuning)
    assert users

    def choose(*_: Any) -> Any: ...

    with chosen_by(choose):
        assert {module.choose for module in users} == {choose}
    assert {module.choose for module in users} == {every_kernel.tuning.choose}


def runs(forms: Forms, *candidates: Sequence[str]) -> tuple[int, list[str]]:
    """How often a call that chooses among candidates several times is made, and what it launches."""
    launched: list[str] = []
    turns = 0
    for _ in forms.in_turn():
        turns += 1
        for some in candidates:
            launched.append(forms.choose("key", some, launched.append, CPU))
    return turns, launched


def test_every_form_is_tried_and_taken() -> None:
    assert runs(Forms()) == (1, [])
    assert runs(Forms(), "abc") == (3, ["a", "a", "b", "b", "c", "c"])
    turns, launched = runs(Forms(), "ab", "x", "cde")
    assert turns == 3
    assert sorted(set(launched)) == ["a", "b", "c", "d", "e", "x"]
    assert runs(Forms(most=2), "abc") == (2, ["a", "a", "b", "b"])
    assert runs(Forms(most=2), "a") == (1, ["a", "a"])


def test_calls_have_their_turns_anew() -> None:
    forms = Forms()
    assert [runs(forms, "abc")[0], runs(forms, "a")[0], runs(forms)[0]] == [3, 1, 1]


def test_tensors_end_where_their_memory_does() -> None:
    x = torch.arange(30.0).reshape(5, 6)[:, 1:4]
    indices = torch.arange(20)[1::3]
    moved = placed(call("no_operator", x, [indices, x], 3, scale=indices), "cpu")
    one, (other, again), number = moved.arguments
    assert number == 3
    assert again is one
    assert moved.options["scale"] is other
    for before, after in ((x, one), (indices, other)):
        assert torch.equal(before, after)
        assert (before.stride(), before.storage_offset()) == (after.stride(), after.storage_offset())
        assert before.data_ptr() != after.data_ptr()
    assert one.untyped_storage().nbytes() == 4 * 28
    assert one.as_strided((28,), (1,), 0).isnan().sum() == 28 - 15
    assert other.untyped_storage().nbytes() == 8 * 20
    assert int(other.as_strided((1,), (1,), 0)) == torch.iinfo(torch.int64).max


def test_errors_are_told() -> None:
    x = torch.tensor([3.0, -4.0, math.nan, math.inf])
    assert error_of(x, x.clone()) == 0
    assert error_of(torch.tensor([3.0, -4.1]), x[:2]) == pytest.approx(0.1 / (4 + math.sqrt(12.5)), rel=1e-5)
    assert error_of(torch.zeros(2), torch.zeros(2)) == 0
    assert error_of(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == math.inf
    for wrong in ([3.0, -4.0, math.nan, -math.inf], [3.0, -4.0, math.inf, math.inf], [3.0, -4.0, 0.0, math.inf]):
        assert error_of(torch.tensor(wrong), x) == math.inf
    assert error_of(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert error_of(torch.tensor([1, 3]), torch.tensor([1, 2])) == math.inf
    assert error_of(torch.zeros(2, 2).t(), torch.zeros(2, 2)) == math.inf
    assert error_of(torch.zeros(2).half(), torch.zeros(2)) == math.inf


def test_rounding_is_that_of_the_least_precise_type() -> None:
    single, half = every_kernel.LARGEST_ERRORS[torch.float32], every_kernel.LARGEST_ERRORS[torch.bfloat16]
    assert largest_error(call("one", torch.ones(1), 2)) == single
    assert largest_error(CAST) == half
    assert largest_error(call("one", torch.ones(1), dtype=torch.bfloat16)) == half
    assert largest_error(call("one", torch.ones(1, dtype=torch.int32), 2)) == 0
    in_tf32 = largest_error(call("one", torch.ones(1), allow_tf32=True))
    assert single < in_tf32 == every_kernel.LARGEST_ERROR_IN_TF32


def beyond_the_end(one: Call) -> Any:
    one.arguments[0][0].as_strided((1,), (1,), 0).fill_(1.0)  # what is before the first element
    return by_reference(one)


def a_trial_with_effect(one: Call) -> Any:
    by_reference(one)
    return by_reference(one)


def one_element_off(one: Call) -> Any:
    results = by_reference(one)
    results[0][-1, -1] += 1
    return results


@pytest.mark.parametrize(
    ("one", "wrong", "where"),
    [
        (CAST, beyond_the_end, "argument 0"),
        (CAST, one_element_off, "result 0"),
        (ADD, a_trial_with_effect, "argument 0"),
        (ADD, lambda one: None, "argument 0"),
    ],
)
def test_what_is_wrong_is_noticed(
    one: Call, wrong: Callable[[Call], Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(every_kernel, "launch", by_reference)
    assert check([one], Forms(), "cpu") == (1, 0.0, [])
    monkeypatch.setattr(every_kernel, "launch", wrong)
    report = check([one], Forms(), "cpu")
    assert report.num_calls == 1
    assert [problem.partition(":")[0] for problem in report.problems] == [f"form 0, {where}"]
    assert f"{one.operator}(" in report.problems[0]
    assert run([one], "cpu", Forms(), math.inf) == 1


def test_forms_that_a_device_refuses_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.errors import OutOfResources

    def choosing(refused: str) -> Callable[[Call], Any]:
        def launch_form(form: str) -> None:
            if form in refused:
                raise OutOfResources(2, 1, "shared memory")

        def launch(one: Call) -> Any:
            forms.choose("key", "abc", launch_form, CPU)
            return by_reference(one)

        return launch

    forms = Forms()
    monkeypatch.setattr(every_kernel, "launch", choosing("b"))
    assert check([CAST], forms, "cpu") == (2, 0.0, [])
    monkeypatch.setattr(every_kernel, "launch", choosing("abc"))
    assert check([CAST], forms, "cpu").problems == [f"no form works: {CAST}"]


def test_the_exit_code_tells_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(every_kernel, "launch", by_reference)
    assert run([CAST, ADD], "cpu", Forms(), math.inf) == 0
    assert "2 calls of 2 operators" in capsys.readouterr().out
    assert run([CAST, ADD], "cpu", Forms(), -1.0) == 1
    assert "left out after -1 s: kitsune::cast_many, kitsune::add_to_scalars_" in capsys.readouterr().out


def test_what_is_asked_for_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "adam"]) == 0
    assert capsys.readouterr().out == "kitsune::adam_\nkitsune::linear_adam_\n"
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "no_operator"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("operator", ["hand_out", "max_pool"])
def test_without_a_gpu_the_interpreter_runs_kernels(operator: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = python("--only", operator)
    assert done.returncode == 0, done.stdout
    assert "0 problems" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_memcheck_is_clean() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, a part of CUDA's toolkit, is not on PATH")
    assert python("--compile-only").returncode == 0
    done = python(under=[sanitizer, "--tool", "memcheck", "--padding", "1024", "--error-exitcode", "99"])
    assert done.returncode == 0, done.stdout


def python(*arguments: str, under: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """A run of its own, with each tensor in memory of its own."""
    return subprocess.run(
        [*under, sys.executable, "-m", "tests.kitsune.kernels.every_kernel", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
