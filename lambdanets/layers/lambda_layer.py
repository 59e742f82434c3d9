"""The lambda layer of the paper for images and volumes (for sequences see `sequence.py`).

Letters: B batch, C channels, N queries, M context positions, H heads, K key depth, V value depth, U intra-depth.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lambdanets.layers.arguments import check_is_tensor, check_tensor, check_type, fx_leaf, layer_arguments
from lambdanets.layers.fusing import Fusing
from lambdanets.layers.pool import halved
from lambdanets.layers.positions import DEFAULT_SCOPE, UNIT, RelativePositions
from lambdanets.layers.projection import Projection, is_plain, merged, project, project_by_calls
from lambdanets.ops import choose
from lambdanets.ops import triton as fused
from lambdanets.ops.operation import accumulation_dtype, apply_lambdas, predict
from lambdanets.ops.positions import Kept, Relative, per_axis
from lambdanets.ops.problem import Options
from lambdanets.ops.triton import pooling
from lambdanets.typed import Count, Deviation

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class LambdaLayer(Fusing):
    """Base class of LambdaLayer1d, LambdaLayer2d and LambdaLayer3d: projections and batch norm around `lambda_op`."""

    dims: int

    @layer_arguments
    def __init__(
        self,
        channels: Count,
        out_channels: Count | None = None,
        *,
        context_channels: Count | None = None,
        heads: Count = 4,
        key_depth: Count = 16,
        intra_depth: Count = 1,
        scope: Count | Sequence[Count] | Literal["default"] | None = "default",
        input_size: Count | Sequence[Count] | None = None,
        stride: Count | Sequence[Count] = 1,
        dilation: Count | Sequence[Count] = 1,
        content: bool = True,
        position: bool = True,
        key_norm: str | None = "softmax",
        query_softmax: bool = False,
        batch_norm: bool | None = None,
        multi_head: bool = False,
        causal: bool | str = False,
        positions: RelativePositions | None = None,
        embedding_std: Deviation | Literal["unit"] = UNIT,
        downsample: str | None = None,
        position_bias: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_channels = channels if out_channels is None else out_channels
        context_channels = channels if context_channels is None else context_channels
        if out_channels % heads:
            near = [n for n in (out_channels - out_channels % heads, out_channels + -out_channels % heads) if n]
            raise ValueError(
                f"out_channels={out_channels} is not divisible by heads={heads}: use out_channels "
                f"{' or '.join(map(str, near))}, or another number of heads"
            )
        Options(key_norm=key_norm, causal=causal)  # raises for unknown values
        check_downsample(downsample, per_axis(stride, self.dims, "stride"), causal)
        if backend not in choose.NAMES:
            raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(map(repr, choose.NAMES))}")
        if not content and not position:
            raise ValueError("content and position are both False: keep at least one of the two interactions")
        self.channels, self.out_channels, self.context_channels = channels, out_channels, context_channels
        self.heads, self.key_depth, self.intra_depth = heads, key_depth, intra_depth
        self.value_depth = out_channels // heads
        self.stride = per_axis(stride, self.dims, "stride")
        self.key_norm, self.query_softmax = key_norm, query_softmax
        self.multi_head, self.causal, self.backend = multi_head, causal, backend
        self.downsample = downsample

        groups = heads if multi_head else 1
        factory = {"device": device, "dtype": dtype}
        self.to_queries = nn.Linear(channels, heads * key_depth, bias=False, **factory)
        self.to_keys = None
        if content:
            self.to_keys = nn.Linear(context_channels, groups * key_depth * intra_depth, bias=False, **factory)
        self.to_values = nn.Linear(context_channels, groups * self.value_depth * intra_depth, bias=False, **factory)
        if batch_norm is None:  # batch statistics leak the future
            batch_norm = not causal
        self.norm_queries = nn.BatchNorm2d(self.to_queries.out_features, **factory) if batch_norm else nn.Identity()
        self.norm_values = nn.BatchNorm2d(self.to_values.out_features, **factory) if batch_norm else nn.Identity()
        self.positions = None
        if positions is not None:
            if not position:
                raise ValueError("positions was given, but position=False: remove one of the two arguments")
            self._check_shared(positions, scope, dilation, input_size)
            self.positions = positions
        elif position:
            self.positions = RelativePositions(
                self.dims,
                DEFAULT_SCOPE[self.dims] if isinstance(scope, str) else scope,
                key_depth,
                intra_depth=intra_depth,
                heads=heads if multi_head else None,
                input_size=input_size,
                dilation=dilation,
                embedding_std=embedding_std,
                batch_norm=batch_norm,
                query_softmax=query_softmax,
                causal=causal,
                **factory,
            )
        if position_bias and not position:
            raise ValueError("position_bias=True needs position lambdas, but position=False: change one of the two")
        bias = torch.empty(*[heads] * multi_head, key_depth, **factory) if position_bias else None
        self.position_bias = None if bias is None else nn.Parameter(bias)
        self.fused_projection = self.kept = None
        self.reset_parameters(positions=False)

    def _check_shared(
        self,
        positions: RelativePositions,
        scope: int | Sequence[int] | str | None,
        dilation: int | Sequence[int],
        input_size: int | Sequence[int] | None,
    ) -> None:
        """Raise ValueError unless shared positions fit this layer and agree with the arguments that were given."""
        heads = self.heads if self.multi_head else None
        wanted = {"dims": self.dims, "key_depth": self.key_depth, "intra_depth": self.intra_depth, "heads": heads}
        if scope is None:
            wanted["is_global"] = True
        elif not isinstance(scope, str):
            wanted["scope"] = per_axis(scope, self.dims, "scope")
        if dilation != 1:
            wanted["dilation"] = per_axis(dilation, self.dims, "dilation")
        if input_size is not None:
            wanted["input_size"] = per_axis(input_size, self.dims, "input_size")
        wrong = [f"{n}={getattr(positions, n)} instead of {w}" for n, w in wanted.items() if getattr(positions, n) != w]
        if wrong:
            raise ValueError(f"the shared positions do not match this layer: {', '.join(wrong)}")

    def reset_parameters(self, positions: bool = True) -> None:
        """Initialise all weights as in the paper: fan-in scaling, for queries additionally by the key depth.

        Args:
            positions: also initialise the position embeddings, with `embedding_std`; False keeps a shared table.
        """
        self.unfuse()
        nn.init.normal_(self.to_queries.weight, std=(self.key_depth * self.channels) ** -0.5)
        nn.init.normal_(self.to_values.weight, std=self.context_channels**-0.5)
        if self.to_keys is not None:
            nn.init.normal_(self.to_keys.weight, std=self.context_channels**-0.5)
        for norm in (self.norm_queries, self.norm_values):
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.reset_parameters()
        if self.position_bias is not None:
            nn.init.zeros_(self.position_bias)
        if positions and self.positions is not None:
            self.positions.reset_parameters()

    @fx_leaf
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to x.

        Args:
            x: the input, from which the queries are computed.
            context: the input for keys and values; x if None. Its grid has the same origin and unit as that of x.
            mask: bool `[N, M]`, True where query n may use context position m; shared by the batch.
            context_mask: bool `[B, *context_space]`, False at padding. If x is its own context, `downsample` leaves
                the outputs at padding out of its means.

        Shape:
            x: `[B, channels, *space]`
            context: `[B, context_channels, *context_space]`
            Output: `[B, out_channels, *ceil(space / stride)]` in the memory format of x; `downsample` counts as stride
                2
        """
        self._check_inputs(x, context)
        outside = None
        if context_mask is not None:
            check_is_tensor(context_mask, "context_mask")
            wanted = [x.shape[0], *(x if context is None else context).shape[2:]]
            if list(context_mask.shape) != wanted:
                raise ValueError(f"context_mask must be {wanted}, [B, *context space], got {list(context_mask.shape)}")
            outside = ~context_mask[:, None] if self.downsample and context is None else None
            context_mask = context_mask.flatten(1)
        queries, keys, values, query_grid, context_grid = self.project(x, context)
        if context is None and mask is None and context_mask is None and self._can_pool_inside(x, queries, values):
            return self._interact_pooled(queries, keys, values, query_grid)
        output = self.interact(queries, keys, values, query_grid, context_grid, mask, context_mask)
        output = output.reshape(x.shape[0], *query_grid, self.out_channels).movedim(-1, 1)
        keeps_format = self.dims > 1 and x.is_contiguous(memory_format=CHANNELS_LAST[self.dims])
        output = output if keeps_format else output.contiguous()
        if self.downsample is None:
            return output
        return halved(output if outside is None else output.masked_fill(outside, 0))

    def project(
        self, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Sequence[int], Sequence[int]]:
        """Return queries [B, N, H, K], raw keys and values in the form of `lambda_op`, and the two grids."""
        asked = x if context is None else context
        if any(s != 1 for s in self.stride):  # query i sits at position i * stride
            x = x[(slice(None), slice(None), *(slice(None, None, s) for s in self.stride))]
            if torch.compiler.is_exporting():  # whether a view can be flattened depends on the size; a copy always can
                x = x.clone(memory_format=torch.contiguous_format)
        query_grid, context_grid = x.shape[2:], asked.shape[2:]
        inputs, asked = x.flatten(2).transpose(1, 2), asked.flatten(2).transpose(1, 2)  # [B, N, C], [B, M, C]
        together = context is None and all(s == 1 for s in self.stride)
        parts = self._project_parts(inputs, asked, together)
        queries = parts[0].view(*parts[0].shape[:2], self.heads, self.key_depth)
        keys = self._split(parts[2], self.key_depth) if self.to_keys is not None else None
        return queries, keys, self._split(parts[1], self.value_depth), query_grid, context_grid

    def query_grid(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the number of queries along each axis for an input of this size, before `downsample`."""
        return tuple(-(-side // step) for side, step in zip(space, self.stride, strict=True))

    def _project_parts(self, inputs: Tensor, asked: Tensor, together: bool) -> list[Tensor]:
        """Return queries, values and (with content) keys, [B, N, channels] each."""
        modules = self._projections()
        if not all(is_plain(linear, norm) for linear, norm in modules):
            return [
                project_by_calls(x, linear, norm)
                for x, (linear, norm) in zip((inputs, asked, asked), modules, strict=False)
            ]
        if not together:
            queries, *rest = [Projection.of(linear, norm) for linear, norm in modules]
            return [*project(inputs, queries), *project(asked, merged(rest))]
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if self.fused_projection is not None and not trains:
            return project(inputs, self.fused_projection)
        whole = merged([Projection.of(linear, norm) for linear, norm in modules])  # one pass over x
        return project(inputs, whole, self.backend == "fused" or (self.backend == "auto" and inputs.is_cuda))

    def _projections(self) -> list[tuple[nn.Linear, nn.Module | None]]:
        """Return the linear maps of queries, values and (with content) keys, and the norms that follow them."""
        found: list[tuple[nn.Linear, nn.Module | None]] = [
            (self.to_queries, self.norm_queries),
            (self.to_values, self.norm_values),
        ]
        return found if self.to_keys is None else [*found, (self.to_keys, None)]

    def _split(self, projected: Tensor, depth: int) -> Tensor:
        """Split the channel axis: [B, M, channels] -> [B, M, (H,) depth(, U)]."""
        shape = [self.heads] if self.multi_head else []
        shape += [depth] if self.intra_depth == 1 else [depth, self.intra_depth]
        return projected if len(shape) == 1 else projected.view(*projected.shape[:2], *shape)

    def interact(
        self,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor,
        query_grid: Sequence[int],
        context_grid: Sequence[int],
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply `lambda_op` with the options of this layer, and add `position_bias`: [B, N, H, V]."""
        placed = self._place(query_grid, context_grid)
        output = apply_lambdas(queries, keys, values, placed, self._options(mask, context_mask))
        return self._add_bias(output, queries.softmax(dim=-1) if self.query_softmax else queries)

    def _options(self, mask: Tensor | None = None, context_mask: Tensor | None = None) -> Options:
        """Return the options of this layer as options of `lambda_op`."""
        return Options(
            content=self.to_keys is not None,
            key_norm=self.key_norm,
            query_softmax=self.query_softmax,
            multi_head=self.multi_head,
            mask=mask,
            context_mask=context_mask,
            causal=self.causal,
            backend=self.backend,
        )

    def _can_pool_inside(self, x: Tensor, queries: Tensor, values: Tensor) -> bool:
        """Return whether the fused kernels can do the work of `interact` and `downsample`."""
        if self.downsample is None or not pooling.takes(x) or x.shape[0] == 0 or self.backend not in ("auto", "fused"):
            return False
        if self.positions is None or self.position_bias is not None or max(self.positions.dilation) > 1:
            return False
        if self.multi_head or self.query_softmax or self.intra_depth > 1:
            return False
        if self.to_keys is not None and self.key_norm != "softmax":
            return False
        if "interact" in vars(self) or type(self).interact is not LambdaLayer.interact:  # overridden
            return False
        sizes = (self.key_depth, self.value_depth, self.heads)
        return queries.dtype == values.dtype and fused.why_not(x.device, queries.dtype, *sizes) is None

    def _interact_pooled(self, queries: Tensor, keys: Tensor | None, values: Tensor, grid: Sequence[int]) -> Tensor:
        """Compute `interact` and average pooling in one step: [B, out_channels, height, width], channels-last."""
        placed = self._place(grid, grid)
        assert placed is not None
        output = fused.fused_relative(queries, values, None, placed.table, grid, grid, keys=keys, pooled=True)
        height, width = (pooling.pooled_side(side, 3) for side in grid)
        return output.reshape(len(queries), height, width, self.out_channels).movedim(-1, 1)

    def _add_bias(self, output_BNHV: Tensor, queries_BNHK: Tensor) -> Tensor:
        """Add the contribution of `position_bias`, which is the same for all values and queries, to the output."""
        if self.position_bias is None:
            return output_BNHV
        dtype = accumulation_dtype(queries_BNHK, self.position_bias)
        extra_BNH = (queries_BNHK.to(dtype) * self.position_bias.to(dtype)).sum(-1)
        return (output_BNHV + extra_BNH[..., None]).to(output_BNHV.dtype)

    def _place(self, query_grid: Sequence[int], context_grid: Sequence[int]) -> Relative | None:
        if self.positions is not None:
            trains = torch.is_grad_enabled() and self.positions.table.requires_grad
            kept = None if trains or torch.compiler.is_compiling() else self.kept
            if kept is not None and kept.table is not self.positions.table:  # the positions were replaced
                kept = self.kept = Kept(self.positions.table)
            return self.positions(query_grid, context_grid, self.stride, kept)
        if self.causal and tuple(query_grid) != tuple(context_grid):
            raise ValueError(
                f"a causal layer with position=False needs equal grids of queries and context, got {tuple(query_grid)} "
                f"and {tuple(context_grid)}: use position=True"
            )
        return None

    def explain(self, x: Tensor, context: Tensor | None = None) -> dict[str, str | float]:
        """Return the predicted seconds of each backend for x, fastest first, or the reason why it cannot run.

        Args:
            x, context: as for `forward`.

        Returns:
            Predicted seconds, or the reason as a string, by name of the backend. See `lambdanets.ops.explain`.
        """
        self._check_inputs(x, context)
        queries, keys, values, query_grid, context_grid = self.project(x, context)
        return predict(queries, keys, values, self._place(query_grid, context_grid), self._options())

    def _check_inputs(self, x: Tensor, context: Tensor | None) -> None:
        self._check_input(x, self.channels, "x")
        check_type(x, self.to_queries, "x")
        if context is not None:
            self._check_input(context, self.context_channels, "context")
            check_type(context, self.to_values, "context")
            if len(context) != len(x):
                raise ValueError(f"x and context must have the same batch size, got {len(x)} and {len(context)}")
        elif self.channels != self.context_channels:
            raise ValueError(
                f"this layer was built with context_channels={self.context_channels}: pass a context, layer(x, context)"
            )

    def _check_input(self, x: Tensor, channels: int, name: str) -> None:
        check_tensor(x, name)
        if x.ndim != self.dims + 2:
            axes = {1: "length", 2: "height, width", 3: "depth, height, width"}[self.dims]
            raise ValueError(f"{name} must be [batch, channels, {axes}], got {list(x.shape)}")
        if x.shape[1] != channels:
            raise ValueError(f"{name} has {x.shape[1]} channels, but this layer was built for {channels}")

    def extra_repr(self) -> str:
        options = f"{self.channels}, {self.out_channels}, heads={self.heads}, key_depth={self.key_depth}"
        for name, usual in (
            ("intra_depth", 1),
            ("stride", (1,) * self.dims),
            ("key_norm", "softmax"),
            ("query_softmax", False),
            ("multi_head", False),
            ("causal", False),
            ("downsample", None),
            ("backend", "auto"),
        ):
            if getattr(self, name) != usual:
                options += f", {name}={getattr(self, name)!r}"
        if self.position_bias is not None:
            options += ", position_bias=True"
        return options


def check_downsample(downsample: str | None, stride: Sequence[int], causal: bool | str) -> None:
    """Raise ValueError if `downsample` is unknown or conflicts with `stride` or `causal`."""
    if downsample is None:
        return
    if downsample != "avg":
        raise ValueError(f"unknown downsample {downsample!r}; choose 'avg' (average pooling after the layer) or None")
    if any(s != 1 for s in stride):
        raise ValueError(f"downsample='avg' cannot be combined with stride={tuple(stride)}: use one of the two")
    if causal:
        raise ValueError(
            f"downsample='avg' cannot be combined with causal={causal!r}: pooling windows reach one position ahead"
        )


class LambdaLayer2d(LambdaLayer):
    """Lambda layer for images.

    Each query position turns its context into a linear function, the lambda, and applies it to its queries. It
    replaces a 3x3 convolution or a self-attention layer.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        context_channels: channels of the context; `channels` if None.
        heads: number of queries per position; all of them use the same lambda. The value depth is
            out_channels / heads.
        key_depth: depth of queries, keys and embeddings.
        intra_depth: the paper's u. Keys, values and embeddings get this many components, which the lambdas sum over;
            the cost of applying a lambda stays the same.
        scope: window of position interactions: an int, (height, width), or None for the whole input (global; requires
            `input_size`). Default: 23.
        input_size: the largest input of a layer with a global scope: an int or (height, width).
        stride: the output is smaller by this factor; query i is at position i * stride.
        dilation: distance between neighbouring positions of the scope.
        content, position: use content interactions and position interactions. An interaction that is off has no
            parameters.
        key_norm: normalisation of the keys over the context positions: "softmax", "l2" or None. With "l2" or None the
            content part of the output is initially far larger than the input (docs/operation.md), so a norm must
            follow.
        query_softmax: apply a softmax over the depth of the queries.
        batch_norm: apply batch norm to queries and values. Default: True, but False in causal layers, because batch
            statistics leak the future.
        multi_head: give each head its own keys, values and embeddings.
        causal: False, True (m <= n) or "strict" (m < n; an empty context gives 0), in row-major order.
        positions: a `RelativePositions` module to share. It determines scope, dilation, input_size and embedding_std.
        downsample: "avg" adds 3x3 average pooling with stride 2 and padding 1, as in the paper's blocks that halve the
            map; on GPUs it runs inside the layer's kernels where that is faster. Not allowed with stride or causal.
        embedding_std: standard deviation of the embeddings at initialisation. "unit" gives the position part of the
            output a variance of 1 for inputs of variance 1: (q * intra_depth * positions) ** -0.5, where q is
            `key_depth` with batch norm and 1 without, and `positions` is the number of context positions that a query
            reaches (with an `input_size`, on a map of that size). The paper uses 1.0; then a norm must follow the
            layer.
        position_bias: add a learned constant per key channel to every position lambda. The paper has none; some other
            implementations do.
        backend: the implementation to run, see `lambdanets.ops.lambda_op`.
        device, dtype: of the parameters.

    Shape:
        x: `[B, channels, height, width]`
        context: `[B, context_channels, context_height, context_width]`, optional
        Output: `[B, out_channels, ceil(height / stride), ceil(width / stride)]`

    Example:
        >>> import torch
        >>> from lambdanets import LambdaLayer2d
        >>> layer = LambdaLayer2d(64, heads=4, key_depth=16, scope=23)
        >>> layer(torch.randn(2, 64, 32, 32)).shape
        torch.Size([2, 64, 32, 32])
        >>> layer = LambdaLayer2d(64, 128, scope=None, input_size=(14, 20), downsample="avg")  # global scope
        >>> layer(torch.randn(2, 64, 14, 20)).shape
        torch.Size([2, 128, 7, 10])
        >>> layer = LambdaLayer2d(64, context_channels=32, scope=7)  # keys and values from another map
        >>> layer(torch.randn(2, 64, 16, 16), torch.randn(2, 32, 16, 16)).shape
        torch.Size([2, 64, 16, 16])
    """

    dims = 2


class LambdaLayer3d(LambdaLayer):
    """Lambda layer for volumes and videos.

    Args:
        channels: number of input channels.
        out_channels: number of output channels, a multiple of `heads`; `channels` if None.
        scope: window of position interactions: an int, (depth, height, width), or None for the whole input (global;
            requires `input_size`). Default: 7.
        input_size, stride, dilation: as for `LambdaLayer2d`, one int or (depth, height, width).
        context_channels, heads, key_depth, intra_depth, content, position, key_norm, query_softmax: as for
            `LambdaLayer2d`.
        batch_norm, multi_head, causal, positions, downsample, embedding_std, position_bias: as for `LambdaLayer2d`.
        backend, device, dtype: as for `LambdaLayer2d`.

    Shape:
        x: `[B, channels, depth, height, width]`
        context: `[B, context_channels, context_depth, context_height, context_width]`, optional
        Output: `[B, out_channels, *ceil(space / stride)]`

    Example:
        >>> import torch
        >>> from lambdanets import LambdaLayer3d
        >>> layer = LambdaLayer3d(32, scope=(3, 7, 7))
        >>> layer(torch.randn(2, 32, 4, 8, 8)).shape
        torch.Size([2, 32, 4, 8, 8])
    """

    dims = 3
