"""The lambda layer of the paper, for images and volumes (sequences: `sequence.py`).

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
    """Projections, batch norm and initialisation around `lambda_op`. Use LambdaLayer1d, 2d or 3d."""

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
                f"out_channels={out_channels} is not divisible by heads={heads}: the value depth would not be whole; "
                f"use out_channels {' or '.join(map(str, near))}, or another number of heads"
            )
        Options(key_norm=key_norm, causal=causal)  # refuses what it does not know
        check_downsample(downsample, per_axis(stride, self.dims, "stride"), causal)
        if backend not in choose.NAMES:
            raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(map(repr, choose.NAMES))}")
        if not content and not position:
            raise ValueError("content=False and position=False leave no interaction at all: keep one of the two")
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
                raise ValueError("positions are given, but position=False: leave one of the two out")
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
            raise ValueError("position_bias belongs to position lambdas, but position=False: leave one of the two out")
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
        """Shared positions must fit this layer, and what the caller says beside them must be theirs."""
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
            raise ValueError(f"the shared positions do not fit this layer: {', '.join(wrong)}")

    def reset_parameters(self, positions: bool = True) -> None:
        """Draw new weights: fan-in for keys and values, and for queries scaled by the key depth too, as in the paper.

        New embeddings follow `embedding_std`; with positions=False (a table that others share) they stay.
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
        """x [B, C, *space] -> [B, out_channels, *ceil(space / stride)], in x's memory format.

        With `downsample` the stride counts as 2.

        Args:
            x: what asks.
            context: what is asked, [B, context_channels, *context space]; x itself if it is None. Its grid shares
                origin and unit with x's.
            mask: bool [N, M], True where query n may look at context position m.
            context_mask: bool [B, *context space], False where an example is padding. Where x is its own context,
                `downsample` leaves the output at these positions out of its means.
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
        """Queries [B, N, H, K], raw keys and values as `lambda_op` takes them, and the two grids."""
        asked = x if context is None else context
        if any(s != 1 for s in self.stride):  # query i sits at position i * stride
            x = x[(slice(None), slice(None), *(slice(None, None, s) for s in self.stride))]
            if torch.compiler.is_exporting():  # whether a view flattens depends on the size; a copy always does
                x = x.clone(memory_format=torch.contiguous_format)
        query_grid, context_grid = x.shape[2:], asked.shape[2:]
        inputs, asked = x.flatten(2).transpose(1, 2), asked.flatten(2).transpose(1, 2)  # [B, N, C], [B, M, C]
        together = context is None and all(s == 1 for s in self.stride)
        parts = self._project_parts(inputs, asked, together)
        queries = parts[0].view(*parts[0].shape[:2], self.heads, self.key_depth)
        keys = self._split(parts[2], self.key_depth) if self.to_keys is not None else None
        return queries, keys, self._split(parts[1], self.value_depth), query_grid, context_grid

    def query_grid(self, space: Sequence[int]) -> tuple[int, ...]:
        """How many queries an input of this size has along each axis; `downsample` comes after them."""
        return tuple(-(-side // step) for side, step in zip(space, self.stride, strict=True))

    def _project_parts(self, inputs: Tensor, asked: Tensor, together: bool) -> list[Tensor]:
        """Queries, values and (with content) keys, [B, N, channels] each."""
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
        """The linear maps of queries, values and (with content) keys, and the norms behind them."""
        found: list[tuple[nn.Linear, nn.Module | None]] = [
            (self.to_queries, self.norm_queries),
            (self.to_values, self.norm_values),
        ]
        return found if self.to_keys is None else [*found, (self.to_keys, None)]

    def _split(self, projected: Tensor, depth: int) -> Tensor:
        """[B, M, channels] -> [B, M, (H,) depth(, U)]."""
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
        """`lambda_op` with this layer's options: [B, N, H, V]."""
        placed = self._place(query_grid, context_grid)
        output = apply_lambdas(queries, keys, values, placed, self._options(mask, context_mask))
        return self._add_bias(output, queries.softmax(dim=-1) if self.query_softmax else queries)

    def _options(self, mask: Tensor | None = None, context_mask: Tensor | None = None) -> Options:
        """This layer's options as those of `lambda_op`."""
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
        """Whether the fused kernels do what `interact` and `downsample` do: for channels-last images and the usual
        options.
        """
        if self.downsample is None or not pooling.takes(x) or x.shape[0] == 0 or self.backend not in ("auto", "fused"):
            return False
        if self.positions is None or self.position_bias is not None or max(self.positions.dilation) > 1:
            return False
        if self.multi_head or self.query_softmax or self.intra_depth > 1:
            return False
        if self.to_keys is not None and self.key_norm != "softmax":
            return False
        if "interact" in vars(self) or type(self).interact is not LambdaLayer.interact:  # it may do anything
            return False
        sizes = (self.key_depth, self.value_depth, self.heads)
        return queries.dtype == values.dtype and fused.why_not(x.device, queries.dtype, *sizes) is None

    def _interact_pooled(self, queries: Tensor, keys: Tensor | None, values: Tensor, grid: Sequence[int]) -> Tensor:
        """`interact` and average pooling in one step: [B, out_channels, height, width], channels-last."""
        placed = self._place(grid, grid)
        assert placed is not None
        output = fused.fused_relative(queries, values, None, placed.table, grid, grid, keys=keys, pooled=True)
        height, width = (pooling.pooled_side(side, 3) for side in grid)
        return output.reshape(len(queries), height, width, self.out_channels).movedim(-1, 1)

    def _add_bias(self, output_BNHV: Tensor, queries_BNHK: Tensor) -> Tensor:
        """The output of lambdas that are larger by `position_bias`, the same for all values and every query."""
        if self.position_bias is None:
            return output_BNHV
        dtype = accumulation_dtype(queries_BNHK, self.position_bias)
        extra_BNH = (queries_BNHK.to(dtype) * self.position_bias.to(dtype)).sum(-1)
        return (output_BNHV + extra_BNH[..., None]).to(output_BNHV.dtype)

    def _place(self, query_grid: Sequence[int], context_grid: Sequence[int]) -> Relative | None:
        if self.positions is not None:
            trains = torch.is_grad_enabled() and self.positions.table.requires_grad
            kept = None if trains or torch.compiler.is_compiling() else self.kept
            if kept is not None and kept.table is not self.positions.table:  # somebody else's were put in their place
                kept = self.kept = Kept(self.positions.table)
            return self.positions(query_grid, context_grid, self.stride, kept)
        if self.causal and tuple(query_grid) != tuple(context_grid):
            raise ValueError(
                f"a causal layer without positions needs equal grids, got {tuple(query_grid)} and "
                f"{tuple(context_grid)}: keep position=True, with whose grid the order is known"
            )
        return None

    def explain(self, x: Tensor, context: Tensor | None = None) -> dict[str, str | float]:
        """Which implementations could run on x: predicted seconds, what "auto" takes first, or why not."""
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
                raise ValueError(f"x has a batch of {len(x)}, its context one of {len(context)}")
        elif self.channels != self.context_channels:
            raise ValueError(f"this layer needs a context with {self.context_channels} channels: layer(x, context)")

    def _check_input(self, x: Tensor, channels: int, name: str) -> None:
        check_tensor(x, name)
        if x.ndim != self.dims + 2:
            axes = {1: "length", 2: "height, width", 3: "depth, height, width"}[self.dims]
            raise ValueError(f"{name} must be [batch, channels, {axes}], got {list(x.shape)}")
        if x.shape[1] != channels:
            raise ValueError(f"{name} has {x.shape[1]} channels, this layer was built for {channels}")

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
    """Refuse an unknown `downsample`, and options that it contradicts."""
    if downsample is None:
        return
    if downsample != "avg":
        raise ValueError(f"unknown downsample {downsample!r}; choose 'avg' (average pooling after the layer) or None")
    if any(s != 1 for s in stride):
        raise ValueError(
            f"downsample='avg' and stride={tuple(stride)} would both make the map smaller: leave one of the two out"
        )
    if causal:
        raise ValueError(
            f"downsample='avg' and causal={causal!r} exclude each other: pooling windows reach one position ahead"
        )


class LambdaLayer2d(LambdaLayer):
    """The lambda layer on images [B, C, height, width].

    Args:
        channels: channels of x.
        out_channels: channels of the output, `channels` if None; a multiple of `heads`.
        context_channels: channels of the context, `channels` if None.
        heads: queries for each lambda. The value depth is out_channels / heads.
        key_depth: depth of queries, keys and embeddings.
        intra_depth: the paper's u: more work for the lambdas, none for applying them.
        scope: the window of position interactions: an int, (height, width), or None for the whole input
            (then `input_size` is required). 23 if not given.
        input_size: the largest input of a layer with a global scope.
        stride: the output is smaller by this factor; query i sits at position i * stride.
        dilation: steps between the positions of the scope.
        content, position: the two kinds of interaction; what is off creates no parameters.
        key_norm: "softmax", "l2" or None, over the context positions. With "l2" or None the content part of the output
            starts far larger than the input, whatever `embedding_std` is (docs/operation.md): a norm must follow.
        query_softmax: softmax over the query depth.
        batch_norm: on queries and values; by default on, but off in causal layers (batch statistics leak the future).
        multi_head: keys, values and embeddings for each head.
        causal: False, True (m <= n) or "strict" (m < n; an empty context gives 0), in row-major order.
        positions: a RelativePositions to share; scope, dilation, input_size and embedding_std are then its own.
        downsample: "avg": 3x3 average pooling with stride 2 and padding 1 follows, as in the paper's blocks that halve
            the map; on GPUs in the same kernels where that is faster. Not with a stride or a causal order.
        embedding_std: standard deviation of new embeddings. "unit": such that the position part of the output starts
            with a variance of 1 for inputs with a variance of 1, (q * intra_depth * positions) ** -0.5, where q is
            `key_depth` with batch norm and 1 without, and `positions` is how many context positions a query reaches
            (with an `input_size`, on a map of that size). The paper's is 1.0: then a norm must follow the layer.
        position_bias: a learned constant for each key channel that is added to every position lambda. The paper has
            none; weights of other implementations do.
        backend: which implementation runs, see `lambdanets.ops.lambda_op`.
    """

    dims = 2


class LambdaLayer3d(LambdaLayer):
    """The lambda layer on volumes or videos [B, C, depth, height, width]; the scope is 7 if not given.

    Arguments as for LambdaLayer2d.
    """

    dims = 3
