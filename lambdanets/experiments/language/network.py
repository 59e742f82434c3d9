"""A causal language model over bytes: blocks of a mixer (lambda layer or softmax attention) and an MLP.

Letters: B batch, N bytes of a sequence, C channels, H heads, D channels of a head.

Both kinds have a parallel form for training and a recurrent form with a state for generation. Norms are layer norms,
which work on each byte separately: batch norm statistics over time would leak the future.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.layers import LambdaLayer1d, StreamState
from lambdanets.options import check_numbers

BYTES = 256
ROOM = 256  # initial capacity of a cache in bytes of text; it doubles when it is full
Kind = Literal["lambda", "attention"]


@dataclass(frozen=True, kw_only=True)
class ByteModelConfig:
    """Configuration of the network."""

    kind: Kind = "lambda"
    """Type of the mixers. lambda: lambda layers; attention: causal softmax attention with rotary positions."""
    width: int = 96
    """Number of channels; a multiple of heads and of twice attention_heads."""
    depth: int = 3
    """Number of blocks."""
    attention_heads: int = 4
    """Number of heads of attention layers."""
    heads: int = 2
    """Number of heads of lambda layers."""
    key_depth: int = 16
    """Key depth of lambda layers."""
    intra_depth: int = 1
    """Intra-depth of lambda layers."""
    reach: int = 31
    """Number of previous bytes in the scope of the position lambdas; content lambdas see all previous bytes."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "attention_heads", "heads", "key_depth", "intra_depth", "reach"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        most = {"width": 65_536, "depth": 1000, "attention_heads": 1024, "heads": 1024, "key_depth": 1024}
        most |= {"intra_depth": 1024, "reach": 1_000_000}
        check_numbers(self, "model.", **{name: (1, limit) for name, limit in most.items()})
        unit = math.lcm(2 * self.attention_heads, self.heads)  # rotary positions rotate pairs of channels
        if self.width % unit:
            raise ValueError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads} and of twice "
                f"model.attention_heads {self.attention_heads}: use {-(-self.width // unit) * unit}"
            )


class LambdaMixer(nn.Module):
    """A causal lambda layer followed by a linear map."""

    def __init__(self, config: ByteModelConfig) -> None:
        super().__init__()
        self.layer = LambdaLayer1d(
            config.width,
            heads=config.heads,
            key_depth=config.key_depth,
            intra_depth=config.intra_depth,
            scope=2 * config.reach + 1,
            causal=True,
        )
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.output(self.layer(x_BNC.transpose(1, 2)).transpose(1, 2))

    def prefill(self, x_BNC: Tensor) -> tuple[Tensor, StreamState]:
        mixed, state = self.layer.prefill(x_BNC.transpose(1, 2))
        return self.output(mixed.transpose(1, 2)), state

    def step(self, x_BC: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        mixed, state = self.layer.step(x_BC, state)
        return self.output(mixed), state


@dataclass(frozen=True)
class Cache:
    """Keys and values of all previous bytes. A step writes into them, so only the newest cache may be continued."""

    keys_BHND: Tensor
    values_BHND: Tensor
    length: int

    def add(self, keys_BHND: Tensor, values_BHND: Tensor) -> "Cache":
        start, stop, room = self.length, self.length + keys_BHND.shape[2], self.keys_BHND.shape[2]
        tensors = [self.keys_BHND, self.values_BHND]
        if stop > room:
            room = max(stop, 2 * room, ROOM)
            larger = [old.new_empty(*old.shape[:2], room, old.shape[3]) for old in tensors]
            for old, new in zip(tensors, larger, strict=True):
                new[:, :, :start] = old[:, :, :start]
            tensors = larger
        for tensor, added in zip(tensors, (keys_BHND, values_BHND), strict=True):
            tensor[:, :, start:stop] = added
        return Cache(tensors[0], tensors[1], stop)


class AttentionMixer(nn.Module):
    """The baseline: causal softmax attention with rotary positions, computed by scaled_dot_product_attention."""

    def __init__(self, config: ByteModelConfig) -> None:
        super().__init__()
        self.heads = config.attention_heads
        self.projection = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def project(self, x_BNC: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, H, N, D] of bytes from position `start` on."""
        q, k, v = self.projection(x_BNC).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        cosine, sine = rotation(start, x_BNC.shape[1], q.shape[3], q)
        return rotated(q, cosine, sine), rotated(k, cosine, sine), v

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.attend(*self.project(x_BNC, 0), causal=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        mixed_BHND = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.output(mixed_BHND.transpose(1, 2).flatten(2))

    def prefill(self, x_BNC: Tensor) -> tuple[Tensor, Cache]:
        q, k, v = self.project(x_BNC, 0)
        empty = k.new_empty(*k.shape[:2], 0, k.shape[3])
        return self.attend(q, k, v, causal=True), Cache(empty, empty, 0).add(k, v)

    def step(self, x_BC: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        q, k, v = self.project(x_BC[:, None], state.length)
        state = state.add(k, v)
        seen = (t[:, :, : state.length] for t in (state.keys_BHND, state.values_BHND))
        return self.attend(q, *seen, causal=False)[:, 0], state


def rotation(start: int, length: int, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [N, D / 2] of rotary position embeddings (Su et al., RoFormer)."""
    frequencies = 10_000.0 ** (-torch.arange(0, channels, 2, device=like.device, dtype=torch.float64) / channels)
    places = torch.arange(start, start + length, device=like.device, dtype=torch.float64)
    angles = places[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x_BHND: Tensor, cosine_NP: Tensor, sine_NP: Tensor) -> Tensor:
    first, second = x_BHND.chunk(2, dim=-1)
    return torch.cat([first * cosine_NP - second * sine_NP, first * sine_NP + second * cosine_NP], dim=-1)


MIXERS = {"lambda": LambdaMixer, "attention": AttentionMixer}
State = tuple[Any, ...]  # the state of the mixer of each block


class Block(nn.Module):
    """x + mixer(norm(x)), then x + perceptron(norm(x)).

    A block has 12 C^2 weights with either mixer: the hidden width of the MLP is 4 C after attention, which has 4 C^2
    weights, and larger after a lambda layer, which has fewer weights.
    """

    def __init__(self, config: ByteModelConfig) -> None:
        super().__init__()
        width = config.width
        self.mixer = MIXERS[config.kind](config)
        rest = 12 * width**2 - sum(p.numel() for p in self.mixer.parameters())
        hidden = round(rest / (2 * width))
        if hidden < 1:
            raise ValueError(
                f"a lambda layer with key_depth {config.key_depth}, intra_depth {config.intra_depth} and reach "
                f"{config.reach} has more weights than a whole block of width {width}: reduce one of them"
            )
        self.norm_mixer, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)
        )
        last = self.perceptron[2]
        assert isinstance(last, nn.Linear)
        for linear in (self.mixer.output, last):  # the sum over all blocks keeps its size
            nn.init.normal_(linear.weight, std=(2 * config.depth * linear.in_features) ** -0.5)

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self.mixer(self.norm_mixer(x_BNC))
        return x_BNC + self.perceptron(self.norm_perceptron(x_BNC))

    def prefill(self, x_BNC: Tensor) -> tuple[Tensor, Any]:
        mixed, state = self.mixer.prefill(self.norm_mixer(x_BNC))
        x_BNC = x_BNC + mixed
        return x_BNC + self.perceptron(self.norm_perceptron(x_BNC)), state

    def step(self, x_BC: Tensor, state: Any) -> tuple[Tensor, Any]:
        mixed, state = self.mixer.step(self.norm_mixer(x_BC), state)
        x_BC = x_BC + mixed
        return x_BC + self.perceptron(self.norm_perceptron(x_BC)), state


class ByteModel(nn.Module):
    """Byte-level language model: bytes [B, N] to logits of the next byte [B, N, 256], with tied embeddings."""

    def __init__(self, config: ByteModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(BYTES, config.width)
        nn.init.normal_(self.embeddings.weight, std=config.width**-0.5)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def embed(self, text: Tensor) -> Tensor:
        return self.embeddings(text) * math.sqrt(self.config.width)

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embeddings.weight)

    def forward(self, text_BN: Tensor) -> Tensor:
        x_BNC = self.embed(text_BN)
        for block in self.blocks:
            x_BNC = block(x_BNC)
        return self.scores(x_BNC)

    @torch.no_grad()
    def prefill(self, text_BN: Tensor) -> tuple[Tensor, State]:
        """Return the logits after the last byte of a prompt, [B, 256], and the state."""
        x_BNC, states = self.embed(text_BN), []
        for block in self.blocks:
            x_BNC, state = block.prefill(x_BNC)  # pyright: ignore[reportCallIssue]
            states.append(state)
        return self.scores(x_BNC[:, -1]), tuple(states)

    @torch.no_grad()
    def step(self, text_B: Tensor, states: State) -> tuple[Tensor, State]:
        """Process one more byte of each text; return the logits of the next one [B, 256] and the next state."""
        x_BC, after = self.embed(text_B), []
        for block, state in zip(self.blocks, states, strict=True):
            x_BC, state = block.step(x_BC, state)  # pyright: ignore[reportCallIssue]
            after.append(state)
        return self.scores(x_BC), tuple(after)

    def ready(self) -> "ByteModel":
        """Prepare for generation: set evaluation mode and merge the projections of lambda layers."""
        for module in self.eval().modules():
            if isinstance(module, LambdaLayer1d):
                module.fuse()
        return self

    def generate(self, prompt: bytes, count: int, *, temperature: float = 1.0, seed: int = 0) -> Iterator[int]:
        """Generate the bytes that follow a prompt.

        Args:
            prompt: at least one byte; b"\\0" is the beginning of a file.
            count: number of bytes to generate.
            temperature: 1 samples from the model's probabilities, 0 always takes the most likely byte.
            seed: random seed of sampling.
        """
        if not prompt:
            raise ValueError("the prompt is empty, it must have at least one byte: b'\\0' is the beginning of a file")
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        device = self.embeddings.weight.device
        generator = torch.Generator().manual_seed(seed)
        scores, state = self.prefill(torch.tensor([list(prompt)], device=device))
        for number in range(count):
            byte = drawn(scores[0].double().cpu(), temperature, generator)
            yield byte
            if number + 1 < count:
                scores, state = self.step(torch.tensor([byte], device=device), state)


def drawn(scores: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(scores.argmax())
    return int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator))


def state_bytes(state: Any) -> int:
    """Return the memory of all tensors in a state in bytes; a view counts with the whole storage behind it."""
    if isinstance(state, Tensor):
        return state.untyped_storage().nbytes()
    parts = state if isinstance(state, tuple | list) else vars(state).values() if hasattr(state, "__dict__") else ()
    return sum(state_bytes(part) for part in parts)
