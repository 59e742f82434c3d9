"""d-li14's LambdaResNet, written again from a reading of its source: names, order of channels, place of pooling."""

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """Queries, keys and values from one 1x1 convolution; keys and values are [U, depth]; pooling inside the layer."""

    def __init__(self, width: int, depth: int = 16, intra: int = 1, heads: int = 4, scope: int = 23, stride: int = 1):
        super().__init__()
        self.sizes = (heads * depth, depth * intra, width // heads * intra)
        self.heads, self.intra, self.stride = heads, intra, stride
        self.conv_qkv = nn.Conv2d(width, sum(self.sizes), 1, bias=False)
        self.norm_q = nn.BatchNorm2d(self.sizes[0])
        self.norm_v = nn.BatchNorm2d(self.sizes[2])
        self.lambda_conv = nn.Conv3d(intra, depth, (1, scope, scope), padding=(0, scope // 2, scope // 2))

    def forward(self, x: Tensor) -> Tensor:
        grid = x.shape[2:]
        queries, keys, values = self.conv_qkv(x).split(self.sizes, dim=1)
        queries = self.norm_q(queries).unflatten(1, (self.heads, -1))  # [B, H, K, Y, X]
        values = self.norm_v(values).unflatten(1, (self.intra, -1))  # [B, U, V, Y, X]
        keys = keys.flatten(2).softmax(-1).unflatten(2, grid).unflatten(1, (self.intra, -1))
        content = torch.einsum("bukyx,buvyx->bkv", keys, values)[..., None, None]
        lambdas = content + self.lambda_conv(values)  # [B, K, V, Y, X]
        output = torch.einsum("bhkyx,bkvyx->bhvyx", queries, lambdas).flatten(1, 2)
        return output if self.stride == 1 else nn.functional.avg_pool2d(output, 3, 2, padding=1)


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, **options: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Layer(width, stride=stride, **options)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride > 1 or channels != 4 * width:
            shortcut = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return (self.bn3(self.conv3(x)) + shortcut).relu()


class LambdaResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], num_classes: int, **options: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        channels = 64
        for i, depth in enumerate(depths):
            width, blocks = 64 * 2**i, []
            for j in range(depth):
                blocks.append(Block(channels, width, 2 if i and j == 0 else 1, **options))
                channels = 4 * width
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, padding=1)
        for i in range(1, 5):
            x = getattr(self, f"layer{i}")(x)
        return self.fc(x.mean((2, 3)))
