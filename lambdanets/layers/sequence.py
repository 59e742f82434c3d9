"""The lambda layer for sequences, with step-by-step evaluation of causal layers.

Letters: B batch, C channels, H heads, K key depth, V value depth, U intra-depth.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import check_tensor, check_type
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.ops.content import RunningContent, apply_shared
from lambdanets.ops.operation import accumulation_dtype
from lambdanets.ops.problem import Problem, problems
from lambdanets.typed import Bounds, read


@dataclass(frozen=True)
class StreamState:
    """State of a causal layer between two steps. Its size does not grow with the sequence.

    Attributes:
        content: running content lambdas: one, one per head of a multi-head layer, or none without content.
        values: the latest values, which position lambdas still need.
        length: number of elements so far.

    Shape:
        values: `[B, reach, (heads,) value_depth(, intra_depth)]`

    Example:
        >>> from lambdanets import LambdaLayer1d
        >>> layer = LambdaLayer1d(16, causal=True, scope=7).eval()
        >>> state = layer.init_state(batch=2)
        >>> state.length, state.values.shape
        (0, torch.Size([2, 3, 4]))
    """

    content: tuple[RunningContent, ...]
    values: Tensor
    length: int


class LambdaLayer1d(LambdaLayer):
    """Lambda layer for sequences.

    A causal layer can also run step by step, for generation: `init_state`, `prefill` and `step`. In eval mode the
    steps and the parallel form compute the same function.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        scope: window of position interactions, or None for the whole input (global; requires `input_size`).
            Default: 23.
        input_size, stride, dilation: as for `LambdaLayer2d`, one int.
        context_channels, heads, key_depth, intra_depth, content, position, key_norm, query_softmax: as for
            `LambdaLayer2d`.
        batch_norm, multi_head, causal, positions, downsample, embedding_std, position_bias: as for `LambdaLayer2d`.
        backend, device, dtype: as for `LambdaLayer2d`.

    Shape:
        x: `[B, channels, length]`
        context: `[B, context_channels, context_length]`, optional
        Output: `[B, out_channels, ceil(length / stride)]`

    Example:
        >>> import torch
        >>> from lambdanets import LambdaLayer1d
        >>> layer = LambdaLayer1d(32, causal=True, scope=15).eval()
        >>> x = torch.randn(2, 32, 100)
        >>> y = layer(x)
        >>> prompt, state = layer.prefill(x[:, :, :99])
        >>> last, state = layer.step(x[:, :, 99], state)
        >>> torch.allclose(last, y[:, :, 99], atol=1e-5)
        True
    """

    dims = 1

    def init_state(self, batch: int) -> StreamState:
        """Return the state before the first step of `batch` sequences."""
        self._check_streams()
        if not torch.compiler.is_compiling():  # sizes may be symbols
            batch = read(Annotated[int, Bounds(0)], batch, "batch")
        weight = self.to_values.weight
        x = weight.new_zeros(batch, self.channels, 0)
        values = self._split(weight.new_zeros(batch, self._reach, self.to_values.out_features), self.value_depth)
        return StreamState(self._content_start(x), values.to(accumulation_dtype(weight)), 0)

    def _content_start(self, x: Tensor) -> tuple[RunningContent, ...]:
        if self.to_keys is None:
            return ()
        keys = self._split(x.new_zeros(len(x), 0, self.to_keys.out_features), self.key_depth)
        values = self._split(x.new_zeros(len(x), 0, self.to_values.out_features), self.value_depth)
        queries = x.new_zeros(len(x), 0, self.heads, self.key_depth)
        dtype = accumulation_dtype(x)
        return tuple(
            RunningContent.start(part.keys_BMKU.to(dtype), part.values_BMVU.to(dtype))
            for part in self._parts(queries, keys, values)
            if part.keys_BMKU is not None
        )

    def _parts(self, queries: Tensor, keys: Tensor | None, values: Tensor) -> list[Problem]:
        return problems(queries, keys, values, None, self._options())

    @torch.no_grad()
    def step(self, x_BC: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """Process one more element of each sequence.

        Args:
            x_BC: the next elements, `[B, channels]`.
            state: the state from `init_state`, `prefill` or the previous step.

        Returns:
            The outputs `[B, out_channels]` and the next state.
        """
        self._check_streams()
        check_tensor(x_BC, "x")
        if not isinstance(state, StreamState):
            raise TypeError(
                f"state must be a StreamState from init_state, prefill or the previous step, got {type(state).__name__}"
            )
        if x_BC.ndim != 2 or x_BC.shape[1] != self.channels:
            raise ValueError(f"x must be [batch, {self.channels}] in a step, got {list(x_BC.shape)}")
        check_type(x_BC, self.to_queries, "x")
        if len(x_BC) != len(state.values):
            raise ValueError(f"the state is for {len(state.values)} sequences, but x has {len(x_BC)}")
        self._check_length(state.length + 1)
        queries, keys, values, _, _ = self.project(x_BC[:, :, None], None)
        dtype, result_dtype = accumulation_dtype(queries, values), queries.dtype
        queries, values = queries.to(dtype), values.to(dtype)
        if self.query_softmax:
            queries = queries.softmax(dim=-1)
        parts = self._parts(queries, None if keys is None else keys.to(dtype), values)
        output = queries.new_zeros(len(x_BC), 1, self.heads, self.value_depth)
        content = []
        if state.content:
            outputs = []
            for part, running in zip(parts, state.content, strict=True):
                assert part.keys_BMKU is not None
                content.append(running.add(part.keys_BMKU, part.values_BMVU, self.key_norm, None))
                seen = running if self.causal == "strict" else content[-1]
                outputs.append(apply_shared(part.queries_BNHK, seen.content_lambda(self.key_norm)))
            output = output + torch.cat(outputs, dim=2)
        window = torch.cat([state.values, values], dim=1)  # [B, reach + 1, (H,) V(, U)]
        if self.positions is not None:
            output = output + self._position_step(queries[:, 0], window)[:, None]
        output = self._add_bias(output, queries)
        after = StreamState(tuple(content), window[:, 1:], state.length + 1)
        return output.flatten(1).to(result_dtype), after

    def _position_step(self, queries_BHK: Tensor, window: Tensor) -> Tensor:
        """Return the position output of the newest query, [B, H, V], from the values in its reach."""
        assert self.positions is not None
        dilation, past = self.positions.dilation[0], (self.positions.scope[0] - 1) // 2
        table = self.positions.table[: past + 1].to(queries_BHK.dtype)  # relative positions -past .. 0
        window = window[:, ::dilation]  # reach is past * dilation: the newest value is the last one taken
        if self.causal == "strict":
            table, window = table[:-1], window[:, :-1]
        h = "h" if self.multi_head else ""
        u = "" if self.intra_depth == 1 else "u"
        return torch.einsum(f"bhk,j{h}k{u},bj{h}v{u}->bhv", queries_BHK, table, window)

    @torch.no_grad()
    def prefill(self, x: Tensor) -> tuple[Tensor, StreamState]:
        """Run the parallel form on a prompt.

        Args:
            x: the prompt, `[B, channels, length]`.

        Returns:
            The outputs `[B, out_channels, length]` and the state after the last element.
        """
        self._check_streams()
        self._check_inputs(x, None)
        self._check_length(x.shape[2])
        queries, keys, values, query_grid, context_grid = self.project(x, None)
        output = self.interact(queries, keys, values, query_grid, context_grid)
        dtype = accumulation_dtype(queries, values)
        start = self.init_state(len(x))
        content = tuple(
            running.add(part.keys_BMKU.to(dtype), part.values_BMVU.to(dtype), self.key_norm, None)
            for part, running in zip(self._parts(queries, keys, values), start.content, strict=False)
            if part.keys_BMKU is not None
        )
        window = torch.cat([start.values, values.to(dtype)], dim=1)
        kept = window[:, window.shape[1] - self._reach :].clone()  # a view would keep the whole prompt in memory
        state = StreamState(content, kept, x.shape[2])
        return output.flatten(2).transpose(1, 2).contiguous(), state

    @property
    def _reach(self) -> int:
        """The number of earlier values that position lambdas use."""
        if self.positions is None:
            return 0
        return (self.positions.scope[0] - 1) // 2 * self.positions.dilation[0]

    def _check_length(self, length: int) -> None:
        positions = self.positions
        if positions is None or not positions.is_global or positions.input_size is None:
            return
        if length > positions.input_size[0]:
            raise ValueError(
                f"a sequence of {length} elements is longer than the input_size {positions.input_size[0]} of this "
                f"global scope: build the layer with a larger input_size or with a local scope"
            )

    def _check_streams(self) -> None:
        if not self.causal:
            raise ValueError("only a causal layer can run step by step: use LambdaLayer1d(..., causal=True)")
        if self.stride != (1,):
            raise ValueError(f"a layer with stride {self.stride[0]} cannot run step by step: use stride=1")
        if self.channels != self.context_channels:
            raise ValueError(
                f"a layer with context_channels={self.context_channels} and channels={self.channels} cannot run step "
                f"by step: use equal numbers"
            )
        if self.training and isinstance(self.norm_queries, nn.modules.batchnorm._BatchNorm):
            raise ValueError("batch statistics need the whole sequence: call layer.eval() before running step by step")
