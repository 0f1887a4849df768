"""torchvision's and timm's image classifiers on ImageNet shapes, without the layers that they drop at random."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from models import torchvision_loading
from models.synthetic import SyntheticImages
from models.torchvision_loading import import_torchvision
from models.workload import Workload

_SIDE, _TINY_SIDE = 224, 32


@dataclass(frozen=True)
class Design:
    """A classifier's two sizes, each from images (N, 3, side, side) to logits: of 224 pixels, and of 32 for tests."""

    whole: Callable[[], nn.Module]
    tiny: Callable[[], nn.Module]
    batch_size: int = 32
    """On CUDA."""
    is_convolutional: bool = True


def _torchvision(name: str, **options: object) -> Callable[[], nn.Module]:
    """Makes torchvision's model of that name, randomly initialized."""
    return lambda: import_torchvision("models").get_model(name, weights=None, **options)


def _tiny_convnext() -> nn.Module:
    convnext = import_torchvision("models.convnext")
    blocks = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(blocks, num_classes=10)  # type: ignore[no-any-return]


def _swin(width: int, depths: list[int], heads: list[int], window: int, num_classes: int) -> Callable[[], nn.Module]:
    """Makes torchvision's Swin transformer, whose names of sizes do not let go of dropping at random."""
    return lambda: import_torchvision("models.swin_transformer").SwinTransformer(
        [4, 4], width, depths, heads, [window, window], stochastic_depth_prob=0.0, num_classes=num_classes
    )


def _tiny_regnet() -> nn.Module:
    regnet = import_torchvision("models.regnet")
    blocks = regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2], 0.25)
    return regnet.RegNet(blocks, num_classes=10, stem_width=8)  # type: ignore[no-any-return]


def _tiny_efficientnet() -> nn.Module:
    efficientnet = import_torchvision("models.efficientnet")
    blocks = [efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1), efficientnet.MBConvConfig(4, 5, 2, 8, 16, 2)]
    return efficientnet.EfficientNet(  # type: ignore[no-any-return]
        blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=10
    )


def _tiny_densenet() -> nn.Module:
    return import_torchvision("models").DenseNet(8, (2, 2, 2, 2), 16, num_classes=10)  # type: ignore[no-any-return]


def _vit(
    side: int, patch: int, num_layers: int, num_heads: int, width: int, num_classes: int
) -> Callable[[], nn.Module]:
    """Makes torchvision's vision transformer in a size that it has no name for."""
    return lambda: import_torchvision("models").VisionTransformer(
        side, patch, num_layers, num_heads, width, 4 * width, num_classes=num_classes
    )


TORCHVISION: Mapping[str, Design] = {
    "convnext_tiny": Design(_torchvision("convnext_tiny", stochastic_depth_prob=0.0), _tiny_convnext),
    "swin_t": Design(
        _swin(96, [2, 2, 6, 2], [3, 6, 12, 24], 7, 1000), _swin(16, [2, 2], [2, 2], 4, 10), is_convolutional=False
    ),
    "regnet_y_800mf": Design(_torchvision("regnet_y_800mf"), _tiny_regnet, 64),
    "efficientnet_b0": Design(
        _torchvision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0), _tiny_efficientnet, 64
    ),
    "mobilenet_v3_large": Design(
        _torchvision("mobilenet_v3_large", dropout=0.0),
        _torchvision("mobilenet_v3_small", dropout=0.0, width_mult=0.25, reduced_tail=True, num_classes=10),
        64,
    ),
    "densenet121": Design(_torchvision("densenet121"), _tiny_densenet),
    "vit_small": Design(_vit(_SIDE, 16, 12, 6, 384, 1000), _vit(_TINY_SIDE, 8, 2, 2, 16, 10), is_convolutional=False),
}
"""torchvision's. ViT-S/16 (Touvron et al., 2020) is its vision transformer with 12 layers of 384 units."""


def _timm(name: str, **options: object) -> Callable[[], nn.Module]:
    """Makes timm's model of that name, randomly initialized."""
    return lambda: _import_timm("models").create_model(name, pretrained=False, **options)


def _tiny_timm_mixer() -> nn.Module:
    mixer = _import_timm("models.mlp_mixer").MlpMixer
    return mixer(10, _TINY_SIDE, patch_size=8, num_blocks=2, embed_dim=16)  # type: ignore[no-any-return]


def _tiny_timm_regnet() -> nn.Module:
    regnet = _import_timm("models.regnet")
    config = regnet.RegNetCfg(depth=5, w0=8, wa=6.0, wm=1.6, group_size=8, stem_width=8, se_ratio=0.25)
    return regnet.RegNet(config, num_classes=10)  # type: ignore[no-any-return]


def _tiny_timm_vit() -> nn.Module:
    vit = _import_timm("models.vision_transformer").VisionTransformer
    return vit(_TINY_SIDE, 8, num_classes=10, embed_dim=16, depth=2, num_heads=2)  # type: ignore[no-any-return]


TIMM: Mapping[str, Design] = {
    "timm_convnext_tiny": Design(
        _timm("convnext_tiny"), _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=10)
    ),
    "timm_mixer_b16": Design(_timm("mixer_b16_224"), _tiny_timm_mixer, is_convolutional=False),
    "timm_regnety_008": Design(_timm("regnety_008"), _tiny_timm_regnet, 64),
    "timm_vit_small": Design(_timm("vit_small_patch16_224"), _tiny_timm_vit, is_convolutional=False),
}
"""timm's, which write the same designs otherwise."""


def timm_missing() -> str | None:
    """Why timm cannot be imported, and what to do; None if it can be."""
    if importlib.util.find_spec("timm") is None:
        return "timm is not installed: install it, `pip install timm`"
    return torchvision_loading.missing()


def _import_timm(submodule: str) -> ModuleType:
    """`timm.<submodule>`. timm imports torchvision, and so needs its operators declared.

    Raises ModuleNotFoundError where timm or torchvision is not installed.
    """
    reason = timm_missing()
    if reason is not None:
        raise ModuleNotFoundError(reason, name="timm")
    import_torchvision("models")
    return importlib.import_module(f"timm.{submodule}")


def workload(name: str, *, tiny: bool) -> Workload:
    """One of these classifiers, of images of ten classes, so that they can be learned in hundreds of steps."""
    design = TORCHVISION[name] if name in TORCHVISION else TIMM[name]
    side = _TINY_SIDE if tiny else _SIDE
    return Workload(
        name=name,
        module=design.tiny() if tiny else design.whole(),
        loss_fn=nn.CrossEntropyLoss(),
        data=SyntheticImages((3, side, side), signal=0.2),
        default_batch_size={"cpu": 2, "cuda": design.batch_size},
        learning_rate=1e-3 if design.is_convolutional else 1e-4,
        channels_last=design.is_convolutional,
    )
