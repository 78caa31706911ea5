"""What OpenVLA's config.json says of its towers, images and tokens. This file imports no torch, for processes that prepare media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compile_and_serve.models.config import ModelConfigError, UnsupportedConfigError, number, positive_int
from compile_and_serve.models.vision.patch_config import TowerConfig

ResizeStrategy = Literal["resize-naive", "letterbox"]
_STRATEGIES: Mapping[str, ResizeStrategy] = {"resize-naive": "resize-naive", "letterbox": "letterbox"}
_NAMES = ("featurizer", "fused_featurizer")
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# timm's names of models → its arguments for them, and the means and standard deviations that they were trained with.
_DINOV2 = {"patch_size": 14, "embed_dim": 1024, "depth": 24, "num_heads": 16, "reg_tokens": 4, "init_values": 1e-5}
_SIGLIP = {"patch_size": 14, "embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362, "class_token": False}
_TIMM: Mapping[str, tuple[Mapping[str, Any], tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "vit_large_patch14_reg4_dinov2": (_DINOV2, _IMAGENET),
    "vit_so400m_patch14_siglip_224": (_SIGLIP, _HALF),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmTower:
    """A `VisionTransformer` of timm, of which the last block is not read.

    name: of its module. leading: rows before the patches: the class token and the registers. scales: its sublayers have a LayerScale.
    """

    name: str
    patches: TowerConfig
    width: int
    depth: int
    num_heads: int
    intermediate_size: int
    leading: int
    scales: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVLAConfig:
    """image_token: stands for an image in a prompt, which the image's rows replace."""

    towers: tuple[TimmTower, ...]
    resize: ResizeStrategy
    image_token: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> OpenVLAConfig:
        """config: the whole config.json. Towers other than OpenVLA's say their sizes in `timm_model_args`, in timm's words.

        Raises `ModelConfigError`.
        """
        ids, sizes = config.get("timm_model_ids"), config.get("image_sizes") or [224, 224]
        if not isinstance(ids, list) or not 1 <= len(ids) <= len(_NAMES) or not isinstance(sizes, list) or len(sizes) < len(ids):
            raise ModelConfigError(
                f"timm_model_ids in the model's config must name one or two towers, with as many image_sizes, got {ids!r:.100} and "
                f"{sizes!r:.100}."
            )
        if any(config.get("timm_override_act_layers") or ()):
            raise UnsupportedConfigError("timm_override_act_layers is not supported: towers have their own activation.")
        strategy = config.get("image_resize_strategy", "letterbox")
        if strategy not in _STRATEGIES:
            raise UnsupportedConfigError(f"image_resize_strategy must be one of {', '.join(_STRATEGIES)}, got {strategy!r:.100}.")
        args = config.get("timm_model_args") or [{}] * len(ids)
        towers = tuple(_tower(*one) for one in zip(_NAMES, ids, sizes, args, strict=False))
        grids = {(tower.patches.patch_size, tower.patches.rows) for tower in towers}
        if len(grids) > 1 or len({tower.leading for tower in towers if tower.leading}) > 1:
            raise UnsupportedConfigError(
                "Both towers must cut an image into the same patches, and have equally many class tokens, or none."
            )
        return cls(towers=towers, resize=_STRATEGIES[strategy], image_token=positive_int(config, "pad_token_id", 32000))

    @property
    def leading(self) -> int:
        """Rows that an encoder's step has before the patches of each image."""
        return max(tower.leading for tower in self.towers)

    @property
    def patches(self) -> TowerConfig:
        """How an image is cut. Its mean and deviation are the first tower's."""
        return self.towers[0].patches


def _tower(name: str, timm_id: Any, size: Any, own: Any) -> TimmTower:
    known = _TIMM.get(str(timm_id).partition(".")[0])
    if not isinstance(own, Mapping) or (known is None and "embed_dim" not in own):
        raise UnsupportedConfigError(
            f"The tower {timm_id!r:.100} is none of {', '.join(_TIMM)}: give its arguments in timm_model_args, as timm names them."
        )
    args, (mean, std) = known or ({}, _HALF)
    args = {"image_size": size, **args, **own}
    patch, width = positive_int(args, "patch_size", 16), positive_int(args, "embed_dim")
    rows = positive_int(args, "image_size") // patch
    has_class = args.get("class_token", True)
    return TimmTower(
        name=name,
        patches=TowerConfig(patch_size=patch, channels=3, rows=rows, columns=rows, mean=mean, std=std),
        width=width,
        depth=positive_int(args, "depth"),
        num_heads=positive_int(args, "num_heads"),
        intermediate_size=int(width * number(args, "mlp_ratio", 4.0)),
        leading=int(bool(has_class)) + int(number(args, "reg_tokens", 0)),
        scales=args.get("init_values") is not None,
    )
