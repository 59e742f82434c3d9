"""The configurations of all named networks. `create_model(name, field=value)` changes a field."""

from dataclasses import dataclass, replace

from lambdanets.data.preprocessing import Preprocessing
from lambdanets.models.config import AttentionNetworkConfig, MobileNetConfig, NetworkConfig, PatchConfig, ResNetConfig


@dataclass(frozen=True)
class Scale:
    """A row of the paper's table of LambdaResNets, with the block configurations of ResNet-RS."""

    depths: tuple[int, int, int, int]
    lambdas_in_c4: tuple[int, ...]  # blocks with a lambda layer, counted from 1; all blocks of c5 have one
    image_size: int  # one of the image sizes in the paper's tables


# Depth N defines resnet_rsN, lambda_resnetN and lambda_resnetN_c4.
SCALES = {
    50: Scale((3, 4, 6, 3), (3,), 160),
    101: Scale((3, 4, 23, 3), (6, 12, 18), 224),
    152: Scale((3, 8, 36, 3), (5, 10, 15, 20, 25, 30), 256),
    200: Scale((3, 24, 36, 3), (5, 10, 15, 20, 25, 30), 320),
    270: Scale((4, 29, 53, 4), (8, 16, 24, 32, 40, 48), 256),
    350: Scale((4, 36, 72, 4), (10, 20, 30, 40, 50, 60), 320),
    420: Scale((4, 44, 87, 4), (10, 20, 30, 40, 50, 60, 70, 80), 320),
}

# ResNet-v1 as in the paper's 90-epoch experiments; placement="LLLL" is its row "lambda layer".
VANILLA = {
    "resnet26": ResNetConfig(depths=(2, 2, 2, 2)),
    "resnet50": ResNetConfig(depths=(3, 4, 6, 3)),
    "resnet101": ResNetConfig(depths=(3, 4, 23, 3)),
    "resnet152": ResNetConfig(depths=(3, 8, 36, 3)),
}
# Keras' ResNet-50, whose weights `lambdanets convert --format resnet-keras` reads.
KERAS = {"resnet50_keras": replace(VANILLA["resnet50"], stride_in="1x1", norm_eps=1e-3)}
RESNET_D = {f"{name}_d": replace(row, stem="deep", shortcut="pool") for name, row in VANILLA.items()}
RESNET_RS = {
    f"resnet_rs{depth}": ResNetConfig(
        depths=scale.depths, image_size=scale.image_size, stem="strided", shortcut="pool", se=True, se_reduction=4
    )
    for depth, scale in SCALES.items()
}
# No squeeze-and-excitation in c4 and c5, even in blocks of c4 with convolutions, which matches the paper's counts.
LAMBDA_RESNETS = {
    f"lambda_resnet{depth}": replace(
        RESNET_RS[f"resnet_rs{depth}"],
        se=(True, True, False, False),
        placement=("C", "C", scale.lambdas_in_c4, "L"),
    )
    for depth, scale in SCALES.items()
}
LAMBDA_RESNETS_C4 = {f"{name}_c4": replace(row, placement="CCLL") for name, row in LAMBDA_RESNETS.items()}

MOBILENETS = {
    "mobilenet_v2": MobileNetConfig(key_depth=32, heads=4, scope=5),
    "lambda_mobilenet_v2": MobileNetConfig(key_depth=32, heads=4, scope=5, placement=(10, 16)),
}

# For images of 28 to 64 pixels, with a stem that keeps the resolution.
TINY = ResNetConfig(
    depths=(2, 2, 2, 2), widths=(32, 64, 128, 256), stem="small", shortcut="pool", image_size=32, num_classes=10
)
SMALL = replace(TINY, depths=(3, 4, 6, 3), widths=(64, 128, 256, 512), image_size=64)
SMALL_IMAGES = {
    "resnet_tiny": TINY,
    "resnet_small": SMALL,
    "lambda_resnet_tiny": replace(TINY, placement="CCLL"),
    "lambda_resnet_small": replace(SMALL, placement="CCLL"),
}

# A scope of 23 covers 14x14 patches except for the corners.
PATCHES = {
    "lambda_patch_tiny": PatchConfig(width=192, depth=8, patch=4, image_size=32, num_classes=10),
    "lambda_patch_small": PatchConfig(width=384, depth=12),
    "lambda_patch_base": PatchConfig(width=768, depth=12),
}

# Zhao et al. 2020 with patchwise attention, as cited in the paper; layer="pairwise_attention" is their other variant.
ATTENTION_NETWORKS = {
    "san10": AttentionNetworkConfig(depths=(2, 1, 2, 4, 1)),
    "san15": AttentionNetworkConfig(depths=(3, 2, 3, 5, 2)),
    "san19": AttentionNetworkConfig(depths=(3, 3, 4, 6, 3)),
}

# timm's networks with lambda layers, for which weights trained on ImageNet exist (`PUBLISHED`).
TIMM_26 = ResNetConfig(
    depths=(2, 2, 2, 2),
    stem="tiered",
    placement=("C", "C", (2,), "L"),
    heads=4,
    key_depth=16,
    scope=9,
    position_bias=True,
    embedding_std=0.25,
    block_pool="2x2",
    image_size=256,
)
TIMM_NETWORKS = {
    "lambda_resnet26t": TIMM_26,
    "lambda_resnet26rpt_256": replace(TIMM_26, scope=None, position_bias=False, embedding_std=0.02),
    "lambda_resnet50ts": replace(
        TIMM_26, depths=(3, 4, 6, 3), placement=("C", (4,), (2, 4, 6), (2,)), activation="silu"
    ),
}


@dataclass(frozen=True)
class Published:
    """Published weights of a network: their id on the Hugging Face hub, and their preprocessing."""

    hub_id: str
    preprocessing: Preprocessing


PUBLISHED = {
    "lambda_resnet26t": Published("timm/lambda_resnet26t.c1_in1k", Preprocessing(size=256, crop=0.94)),
    "lambda_resnet26rpt_256": Published("timm/lambda_resnet26rpt_256.c1_in1k", Preprocessing(size=256, crop=0.94)),
    "lambda_resnet50ts": Published("timm/lambda_resnet50ts.a1h_in1k", Preprocessing(size=256, crop=0.95)),
}

ROWS: dict[str, NetworkConfig] = {
    **VANILLA,
    **KERAS,
    **RESNET_D,
    **RESNET_RS,
    **LAMBDA_RESNETS,
    **LAMBDA_RESNETS_C4,
    **MOBILENETS,
    **SMALL_IMAGES,
    **PATCHES,
    **ATTENTION_NETWORKS,
    **TIMM_NETWORKS,
}

# ImageNet top-1 in the paper, trained without pseudo-labels: (percent as printed, image size, label of the table).
PARETO, C4, EFFICIENT = "tab:pareto_curve_details", "tab:c4_hybrid", "tab:parameter_efficient"
PAPER_TOP1: dict[str, tuple[tuple[str, int, str], ...]] = {
    "lambda_mobilenet_v2": (("73.3", 224, "tab:mobilenets"),),
    "lambda_resnet50": (("77.4", 128, PARETO), ("79.2", 160, PARETO)),
    "lambda_resnet101": (("82.3", 224, C4), ("80.8", 160, PARETO), ("81.9", 192, PARETO)),
    "lambda_resnet101_c4": (("82.6", 224, C4),),
    "lambda_resnet152": (("83.4", 256, C4), ("82.5", 192, PARETO), ("83.2", 224, PARETO), ("83.8", 256, PARETO)),
    "lambda_resnet152_c4": (("83.4", 256, C4), ("84.0", 320, EFFICIENT)),
    "lambda_resnet200_c4": (("84.3", 320, EFFICIENT),),
    "lambda_resnet270": (("84.2", 256, PARETO),),
    "lambda_resnet350": (("84.4", 256, PARETO), ("84.5", 288, PARETO), ("84.7", 320, PARETO)),
    "lambda_resnet420": (("84.9", 320, PARETO),),
    "mobilenet_v2": (("72.7", 224, "tab:mobilenets"),),
    "resnet50": tuple(("76.9", 224, f"tab:{table}") for table in ("resnet50", "ablations", "hybrid_lambdanetworks")),
    "resnet_rs101": (("81.8", 224, C4),),
    "resnet_rs152": (("83.0", 256, C4),),
    "san19": (("78.2", 224, "tab:resnet50"),),
}
