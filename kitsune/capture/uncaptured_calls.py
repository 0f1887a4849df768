"""Why Dynamo could not make one graph of a call, in words of the user's program.

What its exceptions say, and the line that some of them tell, is private.
"""

from __future__ import annotations

import os
import re

import torch

from kitsune.errors import Refusal, first_line

_DYNAMO = os.path.dirname(torch._dynamo.__file__) + os.sep  # where it has its own forms of Python's functions
_TORCH = os.path.dirname(torch.__file__) + os.sep
_KITSUNE = os.path.dirname(os.path.dirname(__file__)) + os.sep

_SWITCHED_OFF = {
    "trace_numpy": Refusal("NumPy is called", remedy="use math or torch"),
    "trace_autograd_ops": Refusal("gradients are computed in the call (torch.autograd.grad)"),
}
"""What Dynamo would have the user switch on, which would change nothing here."""

_IN_OTHER_WORDS = {
    "requires_grad_() call": "gradients are computed in the call (Tensor.requires_grad_)",
    "torch.jit.script/freeze modules": "a module of torch.jit.script is called",
    "ScriptModules": "a module of torch.jit.script is called",
    "`_CachedForward.__get__`": "a module of torch.jit.trace is called",
    "_LegacyVariableBase.__new__": "torch.autograd.Variable() is called; the tensor it is given does as well",
    "data-dependent expression": "what Python does depends on the values of a tensor",
    "Failed to convert args/kwargs": (
        "what torch is given is no tensor and no constant, as a torch.Generator or an array of NumPy"
    ),
    "Guard failed on the same frame": "what the call depends on is another one whenever it is looked at",
    "Reconstruction failure": "the call returns or keeps an object that a replay could not make",
    "HOP: Unsafe side effect": "what is called within a checkpoint or torch.func changes something outside of it",
    "logging.Logger method not supported": "a message is logged",
    "Invalid call to __build_class__": "a class is defined in the call",
    "torch.* op returned non-Tensor": "a function of torch is called that returns no tensor",
    "Tensor.retain_grad() with AOTDispatcher": "Tensor.retain_grad() is called in the model",
    "super() attribute that is not a function": "super() is asked for what is no function",
}
"""What to say in place of Dynamo's words that have one of these in them."""

_SKIPPED = re.compile(r"Developer debug context: module: (\S+), qualname: (\S+), skip reason")
"""Of a function that Dynamo is told not to look into, where its message says which one it is."""


def refusal_of(error: Exception) -> Refusal:
    """What stands in the way, by what Dynamo raised; and where."""
    stack = getattr(error, "real_stack", None)  # only some of Dynamo's exceptions have one
    run = [frame for frame in stack or () if not frame.filename.startswith((_DYNAMO, _KITSUNE))]
    own = [frame for frame in run if not frame.filename.startswith(_TORCH)]
    lines = dict.fromkeys(
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in (*own[-1:], *run[-1:])
    )  # the user's, and torch's where that calls on
    culprit = " -> ".join(lines) or None
    said, remedy = first_line(error), None
    for switch, refusal in _SWITCHED_OFF.items():
        if switch in said:
            said, remedy = refusal.reason, refusal.remedy
    details = str(error).partition("Developer debug context: ")[2].partition("\n")[0]
    if said == "Observed exception":
        said = details or said
    if said == "Dynamic shape operator":
        said = f"a result of {details} has a size that depends on data"
    if "marked as skipped" in said:  # later lines say which function
        explained = next((line for line in str(error).splitlines() if "Explanation:" in line), said)
        found = _SKIPPED.search(str(error))
        said = (
            explained.strip().removeprefix("Explanation: ") if found is None else f"{found[1]}.{found[2]}() is called"
        )
    if "trace the builtin `" in said:
        name = said.split("`")[1].removeprefix("<unknown module>.").rstrip(".")
        said = f"{name}() is called, which is not written in Python"
    said = next((words for fragment, words in _IN_OTHER_WORDS.items() if fragment in said), said)
    return Refusal(f"the call is not one graph: {said}", culprit, remedy)
