"""The zoo: models of many kinds, to see what is fast, what is as fast as before, and what is left alone.

Each is described in a module of its own, by functions that make a `Workload` in its usual size, or in a tiny one of the
same layers for tests.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

from models import torchvision_loading, transformers_loading
from models.workload import Workload, initialization
from models.zoo import (
    autoencoder,
    decoder,
    diffusion_unet,
    distilbert,
    graph_network,
    image_classifiers,
    mixer,
    physics,
    point_cloud,
    radiance_field,
    recommender,
    recurrent,
    reinforcement,
    segmentation_unet,
    speech,
    state_space,
    translation,
    two_towers,
)

__all__ = ["MISSING", "NAMES", "build"]


class _Maker(Protocol):
    def __call__(self, *, tiny: bool) -> Workload: ...


_OF_TRANSFORMERS: Mapping[str, _Maker] = {
    "t5_small": translation.workload,
    "hubert": speech.hubert,
    "whisper_tiny": speech.whisper,
    "distilbert": distilbert.workload,
}
_MAKERS: Mapping[str, _Maker] = {
    "diffusion_unet": diffusion_unet.workload,
    "dlrm": recommender.workload,
    "policy_value": reinforcement.policy_value,
    "graph_network": graph_network.workload,
    "llama": decoder.llama,
    "mistral": decoder.mistral,
    "mamba": state_space.workload,
    "lstm": recurrent.workload,
    "vae": autoencoder.workload,
    "segmentation_unet": segmentation_unet.workload,
    "pointnet": point_cloud.workload,
    "dqn": reinforcement.dqn,
    "nerf": radiance_field.workload,
    "physics_informed": physics.workload,
    "clip": two_towers.workload,
    "mlp_mixer": mixer.workload,
    **{
        name: functools.partial(image_classifiers.workload, name)
        for name in (*image_classifiers.TORCHVISION, *image_classifiers.TIMM)
    },
    **_OF_TRANSFORMERS,
}

NAMES: tuple[str, ...] = tuple(_MAKERS)
"""The zoo's models: those written here, torchvision's, timm's, and those of transformers."""

MISSING: Mapping[str, Callable[[], str | None]] = {
    **dict.fromkeys(image_classifiers.TORCHVISION, torchvision_loading.missing),
    **dict.fromkeys(image_classifiers.TIMM, image_classifiers.timm_missing),
    **dict.fromkeys(_OF_TRANSFORMERS, transformers_loading.missing),
}
"""Of those that need a package: why they cannot be built here, or None."""


def build(name: str, *, seed: int, tiny: bool) -> Workload:
    """The zoo's model of that name, initialized from `seed`; a small one of the same layers if it is to be `tiny`.

    Raises ModuleNotFoundError if it needs a package that is not installed.
    """
    with initialization(seed):
        return _MAKERS[name](tiny=tiny)
