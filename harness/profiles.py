"""What is measured, and how thoroughly: every constant of the measurement stands here. Needs no torch.

The quick profile answers "is Kitsune faster here, and was it before?" in minutes, and the sweep "at every batch size?"
for one commit; the full profile leaves nothing out. The zoo asks "on what models?", of which it has many. The check
asks only "does everything run?", and its figures are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness import variants

DeviceType = Literal["cpu", "cuda"]
Name = Literal["quick", "sweep", "full", "zoo", "check"]
DEFAULT: Name = "quick"
"""What is measured where nobody says how."""
Until = Literal["rounds", "conclusive"]

METHOD_VERSION = "1"
"""Raised when the method changes so that new results cannot be compared with older ones."""

COMMITS: Mapping[Name, int] = {"quick": 3, "sweep": 1, "full": 3, "zoo": 1, "check": 1}
"""How many commits are measured where none are named: HEAD and those before it."""

STABLE_WITHIN = 0.05
"""Warming up ends when the last blocks' times differ by no more than this fraction."""
STABLE_BLOCKS = 3
NARROW_WITHIN = 0.005
"""A round ends early once the interval of each ratio to eager within it is no wider, half of it, as a logarithm: what
is left is small beside what processes differ by, and another round tells more than another turn."""
THROTTLE_RETRIES = 5
"""How many turns of a round are repeated at most because the GPU was throttled in them."""
WARM_UP_BLOCK_SECONDS = 0.02

CURVE_POINTS = 50
"""A loss curve keeps about so many points."""

PHASE_LEAD_IN_STEPS = 3
"""Of the steps that are profiled to tell phases apart, so many come first: the profiler has begun, and on a GPU the
host has to get ahead of the device."""
PHASE_STEPS = 8
"""So many count."""


@dataclass(frozen=True)
class Case:
    """A model at a batch size on a kind of device.

    ``loss_steps`` is the length of the run whose losses are compared; ``default`` marks the batch size that the quick
    profile measures whole.
    """

    model: str
    batch: int
    device_type: DeviceType
    loss_steps: int
    default: bool = False

    @property
    def name(self) -> str:
        """As it stands in results: "mlp-b64"."""
        return f"{self.model}-b{self.batch}"


CASES = (
    Case("mlp", 16, "cpu", 100),
    Case("mlp", 64, "cpu", 100, default=True),
    Case("mlp", 256, "cpu", 100),
    Case("lenet", 16, "cpu", 100),
    Case("lenet", 64, "cpu", 100, default=True),
    Case("lenet", 256, "cpu", 100),
    Case("resnet18", 4, "cpu", 10, default=True),
    Case("resnet18", 8, "cpu", 10),
    Case("resnet18", 32, "cpu", 10),
    Case("resnet50", 1, "cpu", 5, default=True),
    Case("vit_b_16", 1, "cpu", 5, default=True),
    Case("bert_base", 1, "cpu", 5, default=True),
    Case("gpt2_small", 1, "cpu", 5, default=True),
    Case("mlp", 8, "cuda", 300),
    Case("mlp", 64, "cuda", 300, default=True),
    Case("mlp", 128, "cuda", 300),
    Case("mlp", 512, "cuda", 300),
    Case("mlp", 1024, "cuda", 300),
    Case("lenet", 8, "cuda", 300),
    Case("lenet", 64, "cuda", 300, default=True),
    Case("lenet", 128, "cuda", 300),
    Case("lenet", 512, "cuda", 300),
    Case("lenet", 1024, "cuda", 300),
    Case("resnet18", 8, "cuda", 300),
    Case("resnet18", 64, "cuda", 300),
    Case("resnet18", 128, "cuda", 300, default=True),
    Case("resnet18", 512, "cuda", 300),
    Case("resnet18", 1024, "cuda", 300),
    Case("resnet50", 8, "cuda", 300),
    Case("resnet50", 32, "cuda", 300, default=True),
    Case("vit_b_16", 8, "cuda", 300),
    Case("vit_b_16", 32, "cuda", 300, default=True),
    Case("bert_base", 4, "cuda", 300),
    Case("bert_base", 16, "cuda", 300, default=True),
    Case("gpt2_small", 1, "cuda", 300),
    Case("gpt2_small", 4, "cuda", 300, default=True),
)
"""Every case there is: the sizes that `models` names for each device (a test holds the two together), listed here
because asv starts a process for each parameter, and none of them should have to import torch. A round keeps all
variants of a case in memory at once, so the large models have no sizes above the default."""

_ZOO_BATCHES: Mapping[str, tuple[int, int]] = {
    "diffusion_unet": (2, 16),
    "dlrm": (64, 2048),
    "policy_value": (256, 256),
    "graph_network": (400, 8000),
    "llama": (1, 4),
    "mistral": (1, 4),
    "mamba": (2, 8),
    "lstm": (4, 32),
    "vae": (8, 64),
    "segmentation_unet": (1, 8),
    "pointnet": (4, 32),
    "dqn": (16, 32),
    "nerf": (32, 1024),
    "physics_informed": (64, 4096),
    "clip": (4, 64),
    "mlp_mixer": (2, 32),
    "convnext_tiny": (2, 32),
    "swin_t": (2, 32),
    "regnet_y_800mf": (2, 64),
    "efficientnet_b0": (2, 64),
    "mobilenet_v3_large": (2, 64),
    "densenet121": (2, 32),
    "vit_small": (2, 32),
    "timm_convnext_tiny": (2, 32),
    "timm_mixer_b16": (2, 32),
    "timm_regnety_008": (2, 64),
    "timm_vit_small": (2, 32),
    "t5_small": (1, 16),
    "hubert": (1, 8),
    "whisper_tiny": (1, 8),
    "distilbert": (1, 32),
}
"""The batch sizes of the zoo's models on the CPU and on CUDA: those that `models` names, which a test holds together.
"""

ZOO_LOSS_STEPS: Mapping[DeviceType, int] = {"cpu": 5, "cuda": 20}
"""After so many steps the losses of the zoo's models are compared, from the first on and from the same state: steps of
the larger ones take seconds on a CPU."""

ZOO_MODELS = tuple(_ZOO_BATCHES)

_DEVICE_TYPES: tuple[DeviceType, ...] = ("cpu", "cuda")

ZOO = tuple(
    Case(model, batch, device_type, ZOO_LOSS_STEPS[device_type], default=True)
    for model, batches in _ZOO_BATCHES.items()
    for device_type, batch in zip(_DEVICE_TYPES, batches, strict=True)
)
"""The cases of the zoo, which its own profile measures, and others where they are named."""

FULL_ONLY = ("resnet50", "vit_b_16", "bert_base", "gpt2_small")
"""The models that are in the full profile only: those that `models` calls large."""


@dataclass(frozen=True)
class Effort:
    """How thoroughly a case is measured.

    Attributes:
        rounds: fresh processes that time all variants in turns.
        turns: the fewest and the most timed blocks of a variant in a round.
        timed_seconds: about how long a round's timed blocks may take altogether; it decides between the two.
        block_seconds: about how long a block of any variant takes, by its pace when it was warm: what the variant
            before it has left in caches and clocks is small beside that.
        warm_up_seconds: the longest a variant is warmed up.
        settle_seconds: the longest a variant may take to reach its steady state.
        process_seconds: after so long a process is taken for hung.
        narrow_within: a round ends, after its fewest turns, once the half-widths of its ratios' intervals are this.
        throttle_retries: how many turns of a round are repeated at most.
        most_rounds: how many rounds there may be where more are asked for until verdicts are conclusive.
    """

    rounds: int
    turns: tuple[int, int]
    timed_seconds: float
    block_seconds: float
    warm_up_seconds: float
    settle_seconds: float
    process_seconds: float
    narrow_within: float = NARROW_WITHIN
    throttle_retries: int = THROTTLE_RETRIES
    most_rounds: int = 12


@dataclass(frozen=True)
class Sampling:
    """How long to go on, where that is not the profile's choice; None leaves it to the profile.

    ``until`` is "rounds" for a fixed number of them, or "conclusive" for more where a verdict is not.
    """

    until: Until = "rounds"
    most_rounds: int | None = None
    narrow_within: float | None = None
    timed_seconds: float | None = None

    def applied(self, effort: Effort) -> Effort:
        """The effort, changed in what is chosen here; at least as many rounds are allowed as there are."""
        chosen = replace(
            effort,
            narrow_within=effort.narrow_within if self.narrow_within is None else self.narrow_within,
            timed_seconds=effort.timed_seconds if self.timed_seconds is None else self.timed_seconds,
        )
        most = effort.most_rounds if self.most_rounds is None else self.most_rounds
        return replace(chosen, rounds=min(effort.rounds, most), most_rounds=most)


AS_THE_PROFILE_SAYS = Sampling()


_SHORT: Mapping[DeviceType, Effort] = {
    "cpu": Effort(3, (5, 12), 1.2, 0.05, 0.4, 60.0, 240.0),
    "cuda": Effort(4, (8, 15), 5.0, 0.04, 1.0, 120.0, 420.0),
}
_LONG: Mapping[DeviceType, Effort] = {
    "cpu": Effort(6, (10, 30), 20.0, 0.2, 2.0, 300.0, 1200.0),
    "cuda": Effort(8, (15, 30), 30.0, 0.08, 2.0, 300.0, 1200.0),
}

_BRIEF: Mapping[DeviceType, Effort] = {
    "cpu": Effort(2, (2, 3), 0.3, 0.02, 0.1, 60.0, 240.0),
    "cuda": Effort(2, (2, 3), 0.3, 0.01, 0.2, 120.0, 420.0),
}

_BROAD: Mapping[DeviceType, Effort] = {
    "cpu": Effort(2, (3, 5), 2.0, 0.05, 0.2, 60.0, 600.0),
    "cuda": Effort(3, (5, 10), 3.0, 0.04, 0.5, 90.0, 540.0),
}
"""That of the zoo: what takes long there is to set up nine variants of a model in each process."""

_SWEEP: Mapping[DeviceType, tuple[str, ...]] = {
    "cpu": ("eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"),
    "cuda": (
        "eager_amp",
        "handcaptured_amp",
        "handcaptured_compile_amp",
        "kitsune_trainstep_one_stream_amp",
        "kitsune_trainstep_amp",
    ),
}
"""What is measured over batch sizes: eager, Kitsune, and on CUDA the fastest peers and what several streams gain."""

_SWEPT_WHOLE = ("handcaptured_amp", "kitsune_trainstep_amp")
"""Of these the memory is compared at every batch size, and the streams of Kitsune's step are shown."""

ZOO_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("eager_fp32", "kitsune_dropin_fp32", "kitsune_deferred_fp32", "kitsune_trainstep_fp32"),
    "cuda": (
        "eager_amp",
        "compile_amp",
        "compile_reduce_overhead_amp",
        "handcaptured_amp",
        "handcaptured_compile_amp",
        "handcaptured_compile_max_autotune_amp",
        "kitsune_dropin_amp",
        "kitsune_deferred_amp",
        "kitsune_trainstep_amp",
    ),
}
"""What is measured of the zoo: eager, all forms of Kitsune, and on CUDA every peer that may be the fastest. On the CPU
compiling takes longer than everything else there, and nothing is captured by hand."""

_SLOW_TO_SET_UP = ("handcaptured_compile_max_autotune_amp",)
"""Peers that try so many kernels that the quick profile leaves them out."""

_EARLIER = tuple(
    f"{form}_{precision}"
    for form in ("eager", "handcaptured", "kitsune_dropin", "kitsune_trainstep")
    for precision in ("fp32", "amp")
)
"""What the quick profile on CUDA measures at the commits before HEAD: what may have changed, and what to hold it to.
On the CPU it measures those of them that are in float32 and can run there, at all commits, and hardly more."""


def lead_in_steps(device_type: str, steps: int) -> int:
    """How many steps that are not timed come before a block of so many that are, and never more than these.

    The variant before it left the caches cold; and on a GPU the host has yet to get ahead of the device.
    """
    if device_type == "cuda":
        return min(steps, 4)
    return 1 if steps >= 4 else 0


def effort(profile: Name, device_type: DeviceType) -> Effort:
    """How thoroughly this profile measures on this kind of device."""
    if profile == "check":
        return _BRIEF[device_type]
    if profile == "zoo":
        return _BROAD[device_type]
    return (_LONG if profile == "full" else _SHORT)[device_type]


def cases(profile: Name, device_type: DeviceType) -> tuple[Case, ...]:
    """The cases of a profile on a kind of device; :func:`left_out` says what it measures of each."""
    of_profile = ZOO if profile == "zoo" else CASES
    on_device = tuple(case for case in of_profile if case.device_type == device_type)
    if profile in ("full", "zoo"):
        return on_device
    return tuple(case for case in on_device if case.model not in FULL_ONLY and (case.default or profile == "sweep"))


@dataclass(frozen=True)
class Selection:
    """Names of cases and variants to measure, whether the profile has them or not; empty leaves it to the profile.

    ``own`` are the cases of the user's own models; where there are any, they are measured instead of all others.
    """

    cases: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    own: tuple[Case, ...] = ()


EVERYTHING = Selection()


def check_selection(selection: Selection) -> None:
    """Raises ValueError if it names what does not exist; the message says what does."""
    cases = tuple(dict.fromkeys(case.name for case in selection.own or (*CASES, *ZOO)))
    for name in selection.cases:
        if name not in cases:
            raise ValueError(f"no case {name!r}; there are {', '.join(cases)}")
    for name in selection.variants:
        variants.get(name)


def selected_cases(profile: Name, device_type: DeviceType, selection: Selection) -> tuple[Case, ...]:
    """The cases to measure: those of the profile, or those that were named and exist on this kind of device."""
    every = [case for case in selection.own or (*CASES, *ZOO) if case.device_type == device_type]
    if selection.cases:
        return tuple(case for case in every if case.name in selection.cases)
    if selection.own:
        return tuple(case for case in every if case.default or profile in ("sweep", "full"))
    return cases(profile, device_type)


def cases_of_models(
    profile: Name, device_type: DeviceType, models: Iterable[str], own: Sequence[Case] = ()
) -> tuple[str, ...]:
    """The names of a profile's cases of these models, to select them by.

    Args:
        own: the cases of the user's own models, which are then chosen among instead.

    Raises:
        ValueError: the profile measures no model of that name there; the message says which it does.
    """
    found = selected_cases(profile, device_type, Selection(own=tuple(own)))
    known = tuple(dict.fromkeys(case.model for case in found))
    for model in models:
        if model not in known:
            raise ValueError(f"the {profile} profile has no model {model!r} here; it has {', '.join(known)}")
    return tuple(case.name for case in found if case.model in models)


def selected_out(
    profile: Name, case: Case, variant: variants.Variant, selection: Selection, *, at_head: bool
) -> str | None:
    """Why a variant of one of the selected cases is not measured; None if it is. What was named is."""
    if not selection.variants:
        return left_out(profile, case, variant, at_head=at_head)
    return None if variant.name in selection.variants else "not asked for"


def needs_profile(profile: Name, variant: variants.Variant, *, at_head: bool) -> bool:
    """Whether set-up, peak memory and losses are measured at a commit, and not its time alone.

    Those of a peer do not change from commit to commit, so the quick profile measures them at HEAD; the losses of eager
    PyTorch are needed everywhere, to compare with. Of Kitsune with something switched off it wants the time alone, as
    the sweep does of most.
    """
    if profile in ("full", "zoo"):
        return True
    if profile == "sweep":
        return variant.name in _SWEPT_WHOLE
    if variant.is_diagnostic:
        return False
    return at_head or variant.is_kitsune or variant.family == "eager"


def needs_continuation(profile: Name) -> bool:
    """Whether variants in their steady state are held against eager from the same state: on models of the zoo, of which
    less is known.
    """
    return profile == "zoo"


def needs_second_setup(profile: Name, *, at_head: bool) -> bool:
    """Whether set-up is measured a second time, with the caches that the first one has filled: at HEAD, and by the full
    profile everywhere. That is one more process for each variant that keeps anything, as long as its set-up. The zoo
    has too many models for that.
    """
    return profile == "full" or (at_head and profile != "zoo")


def left_out(profile: Name, case: Case, variant: variants.Variant, *, at_head: bool) -> str | None:
    """Why a profile does not measure a variant of one of its cases; None if it does. The full profile measures all."""
    if profile == "full":
        return None
    if profile == "check":
        fits = case.device_type == "cuda" or (variant.precision == "fp32" and variant.cuda_only is None)
        return None if fits and variant.name in _EARLIER else "not part of the check"
    if profile == "sweep":
        is_swept = variant.name in _SWEEP[case.device_type]
        return None if is_swept else "not part of the sweep over batch sizes; the full profile measures it"
    if profile == "zoo":
        return None if variant.name in ZOO_VARIANTS[case.device_type] else "not part of the zoo's profile"
    if variant.name in _SLOW_TO_SET_UP and case.device_type == "cuda":
        return "takes too long to set up for the quick profile; the zoo's and the full profile measure it"
    if case.device_type == "cuda":
        return None if at_head or variant.name in _EARLIER else "measured at HEAD only"
    return _left_out_on_cpu(case, variant, at_head)


def _left_out_on_cpu(case: Case, variant: variants.Variant, at_head: bool) -> str | None:
    """There are five minutes for three commits on two cores, where compiling one model takes 15 to 40 seconds."""
    if variant.cuda_only is not None:
        return variant.cuda_only
    if variant.precision == "fp32" and variant.name in _EARLIER:
        return None
    if variant.name != "compile_fp32" or case.model != "mlp":
        return "not part of the quick profile on the CPU; the full profile measures it"
    return None if at_head else "compiling takes too long for the quick profile on the CPU: measured at HEAD only"
