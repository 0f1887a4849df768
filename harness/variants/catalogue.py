"""What each variant is: plain values, importable without torch.

In all of them cuDNN searches for the fastest algorithm (``cudnn.benchmark`` with ``benchmark_limit = 0``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["eager", "compile", "handcaptured", "kitsune_dropin", "kitsune_trainstep"]
Precision = Literal["fp32", "tf32", "amp"]


@dataclass(frozen=True)
class Variant:
    """One way of training a model, with every choice that affects its speed.

    Attributes:
        name: as it stands in results.
        title: as a reader sees it.
        family: how the step is run.
        precision: "fp32" (torch's defaults: cuDNN may use TF32, matrix products may not), "tf32" (both may), "amp"
            (bfloat16 autocast).
        channels_last: the layout of convolutional models on CUDA; on the CPU only the autocast variants change it, so
            that float32 variants there run the same kernels as eager PyTorch.
        fused: ``Adam(fused=True)``; without it torch chooses.
        compile_mode: the mode given to ``torch.compile``; None does not compile.
        num_streams: the most CUDA streams that Kitsune may use; None leaves it at its default.
        enable_fusion: whether Kitsune may fuse operators; None leaves it at its default.
        defer_loss: whether Kitsune's drop-in loop defers the loss; None leaves it at its default.
        cuda_only: why the variant exists on CUDA only; None where it exists everywhere.
    """

    name: str
    title: str
    family: Family
    precision: Precision
    channels_last: bool = False
    fused: bool = False
    compile_mode: str | None = None
    num_streams: int | None = None
    enable_fusion: bool | None = None
    defer_loss: bool | None = None
    cuda_only: str | None = None

    @property
    def is_kitsune(self) -> bool:
        """Whether it is this project's own work; the others are its peers."""
        return self.family in ("kitsune_dropin", "kitsune_trainstep")

    @property
    def is_diagnostic(self) -> bool:
        """Whether it is Kitsune with something switched off, to tell what that contributes; users run the others."""
        return self.num_streams is not None or self.enable_fusion is not None

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of Kitsune that are not left at their defaults."""
        fields = {"num_streams": self.num_streams, "enable_fusion": self.enable_fusion, "defer_loss": self.defer_loss}
        return {name: value for name, value in fields.items() if value is not None}

    def uses_channels_last(self, device_type: str) -> bool:
        """Whether convolutional models are laid out channels last on this kind of device."""
        return self.channels_last and (device_type == "cuda" or self.precision == "amp")


_GRAPHS = "CUDA graphs exist on CUDA devices only"
_TF32 = "TF32 exists on CUDA devices only"
_STREAMS = "without CUDA there are no streams to choose from"
_FUSION = "without CUDA nothing is fused"

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("eager_fp32", "eager, float32", "eager", "fp32"),
        Variant("eager_tf32", "eager, TF32", "eager", "tf32", cuda_only=_TF32),
        Variant("eager_amp", "eager, autocast", "eager", "amp", channels_last=True, fused=True),
        Variant(
            "compile_fp32", "torch.compile, float32", "compile", "fp32", channels_last=True, fused=True,
            compile_mode="default",
        ),
        Variant(
            "compile_amp", "torch.compile, autocast", "compile", "amp", channels_last=True, fused=True,
            compile_mode="default",
        ),
        Variant(
            "compile_reduce_overhead_amp", "torch.compile reduce-overhead, autocast", "compile", "amp",
            channels_last=True, fused=True, compile_mode="reduce-overhead", cuda_only=_GRAPHS,
        ),
        Variant(
            "handcaptured_fp32", "captured by hand, float32", "handcaptured", "fp32", channels_last=True, fused=True,
            cuda_only=_GRAPHS,
        ),
        Variant(
            "handcaptured_amp", "captured by hand, autocast", "handcaptured", "amp", channels_last=True, fused=True,
            cuda_only=_GRAPHS,
        ),
        Variant(
            "handcaptured_compile_fp32", "torch.compile captured by hand, float32", "handcaptured", "fp32",
            channels_last=True, fused=True, compile_mode="default", cuda_only=_GRAPHS,
        ),
        Variant(
            "handcaptured_compile_amp", "torch.compile captured by hand, autocast", "handcaptured", "amp",
            channels_last=True, fused=True, compile_mode="default", cuda_only=_GRAPHS,
        ),
        Variant(
            "handcaptured_compile_max_autotune_amp", "torch.compile max-autotune captured by hand, autocast",
            "handcaptured", "amp", channels_last=True, fused=True, compile_mode="max-autotune-no-cudagraphs",
            cuda_only=_GRAPHS,
        ),
        Variant("kitsune_dropin_fp32", "Kitsune drop-in, float32", "kitsune_dropin", "fp32", channels_last=True),
        Variant("kitsune_dropin_amp", "Kitsune drop-in, autocast", "kitsune_dropin", "amp", channels_last=True),
        Variant(
            "kitsune_deferred_fp32", "Kitsune drop-in, loss deferred, float32", "kitsune_dropin", "fp32",
            channels_last=True, defer_loss=True,
        ),
        Variant(
            "kitsune_deferred_amp", "Kitsune drop-in, loss deferred, autocast", "kitsune_dropin", "amp",
            channels_last=True, defer_loss=True,
        ),
        Variant(
            "kitsune_trainstep_fp32", "Kitsune TrainStep, float32", "kitsune_trainstep", "fp32", channels_last=True
        ),
        Variant("kitsune_trainstep_amp", "Kitsune TrainStep, autocast", "kitsune_trainstep", "amp", channels_last=True),
        Variant(
            "kitsune_dropin_unfused_fp32", "Kitsune drop-in on one stream, unfused, float32", "kitsune_dropin",
            "fp32", channels_last=True, num_streams=1, enable_fusion=False, cuda_only=_FUSION,
        ),
        Variant(
            "kitsune_dropin_unfused_amp", "Kitsune drop-in on one stream, unfused, autocast", "kitsune_dropin",
            "amp", channels_last=True, num_streams=1, enable_fusion=False, cuda_only=_FUSION,
        ),
        Variant(
            "kitsune_trainstep_one_stream_fp32", "Kitsune TrainStep on one stream, float32", "kitsune_trainstep",
            "fp32", channels_last=True, num_streams=1, cuda_only=_STREAMS,
        ),
        Variant(
            "kitsune_trainstep_one_stream_amp", "Kitsune TrainStep on one stream, autocast", "kitsune_trainstep",
            "amp", channels_last=True, num_streams=1, cuda_only=_STREAMS,
        ),
        Variant(
            "kitsune_trainstep_unfused_fp32", "Kitsune TrainStep on one stream, unfused, float32", "kitsune_trainstep",
            "fp32", channels_last=True, num_streams=1, enable_fusion=False, cuda_only=_FUSION,
        ),
        Variant(
            "kitsune_trainstep_unfused_amp", "Kitsune TrainStep on one stream, unfused, autocast", "kitsune_trainstep",
            "amp", channels_last=True, num_streams=1, enable_fusion=False, cuda_only=_FUSION,
        ),
    )
}  # fmt: skip
"""All variants by name, in the order in which tables show them: peers first."""


def names() -> tuple[str, ...]:
    """The names of all variants, in order."""
    return tuple(VARIANTS)


def get(name: str) -> Variant:
    """The variant of that name.

    Raises:
        ValueError: there is none; the message names those that exist.
    """
    if name not in VARIANTS:
        raise ValueError(f"no variant {name!r}; there are {', '.join(VARIANTS)}")
    return VARIANTS[name]
