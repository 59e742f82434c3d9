"""Safe reading of weights: files cannot run code or make the program allocate much more memory than their size."""

import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lambdanets.files import as_object, parse_json
from lambdanets.models.compact import expand

SPARE = 2**26  # elements that a network may have in addition to the bytes of its file: new classifiers, buffers
SPARE_TENSORS = 1000
BYTES_OF_A_TENSOR = 50  # smallest size of a tensor's entry in a header
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)


class NonFiniteWeightsWarning(UserWarning):
    """A warning that weights have NaN or infinite values."""


class NewClassifierWarning(UserWarning):
    """A warning that the classifier is not loaded, because the weights have `classes` classes."""

    def __init__(self, message: str, classes: int) -> None:
        super().__init__(message)
        self.classes = classes


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata in the header of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise not_whole(path, error) from error


def read_description_of(path: Path, key: str) -> dict[str, Any] | None:
    """Read the JSON object under `key` in the header of a safetensors file; None if there is none."""
    text = read_metadata(path).get(key)
    if text is None:
        return None
    return as_object(parse_json(text, f"the header of {path}", constants=True), f"the header of {path}")


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or of a state dict from torch.save; 8-bit weights become float32."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(str(path))
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            raise not_whole(path, error) from error
        return expand(state, path)
    try:
        with torch.serialization.safe_globals([Namespace]):  # timm's checkpoints include one
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{path} is refused: it is not a torch file, or it has objects other than tensors, whose loading could run "
            f"code. Save only its state_dict"
        ) from error
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # truncated files raise many classes of errors
        why = f": {str(error).partition('.')[0]}" if isinstance(error, RuntimeError) else ", or none at all"
        raise ValueError(f"{path} is not a whole torch file{why}") from error
    for key in ("state_dict", "model"):  # keys of checkpoints of timm and torchvision
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in state.items()):
        raise ValueError(f"{path} is not a dictionary of tensors")
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(f"{path}: {name} is not a plain tensor ({tensor.layout}, {tensor.dtype}, {tensor.device})")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{path}: {name} is {list(tensor.shape)}, which is larger than its storage: save tensor.contiguous()"
            )
    return unwrapped(state)


def not_whole(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a whole safetensors file: {' '.join(str(error).split())[:200]}")


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of DataParallel and torch.compile from the names."""
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in state.items()}


def non_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with NaN or infinite values."""
    return [
        name for name, tensor in state.items() if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]


def non_finite_message(path: Path, names: list[str], total: int) -> str:
    return (
        f"{path}: {len(names)} of {total} tensors have values that are not finite (NaN or infinite), {names[0]} first: "
        f"its training diverged or the file is damaged; use other weights"
    )


@contextmanager
def only_finite_weights() -> Iterator[None]:
    """Raise a ValueError inside the context if loaded weights have NaN or infinite values."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonFiniteWeightsWarning)
        try:
            yield
        except NonFiniteWeightsWarning as warning:
            raise ValueError(str(warning)) from None


@contextmanager
def new_classifiers() -> Iterator[list[NewClassifierWarning]]:
    """Collect the warnings about new classifiers inside the context instead of showing them."""
    found: list[NewClassifierWarning] = []
    others: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", NewClassifierWarning)
            try:
                yield found
            finally:
                for one in seen:
                    if isinstance(one.message, NewClassifierWarning):
                        found.append(one.message)
                    else:
                        others.append(one)
    finally:
        for one in others:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def check_finite(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if weights have NaN or infinite values."""
    found = non_finite(state)
    if found:
        raise ValueError(non_finite_message(path, found, len(state)))


class Budget(TorchFunctionMode):
    """Counts new tensors and their elements, and raises a ValueError above a limit."""

    def __init__(self, elements: int, tensors: int, what: str) -> None:
        super().__init__()
        self.left, self.tensors_left = elements, tensors
        self.most = f"{elements:,} parameters or {tensors:,} tensors"
        self.what = what

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in FACTORIES:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], list | tuple) else args)
            self.left -= prod(s for s in size if isinstance(s, int))
            self.tensors_left -= 1
            if min(self.left, self.tensors_left) < 0:
                raise ValueError(
                    f"{self.what} describes a network of more than {self.most}, which is far more than the file has: "
                    f"it is damaged, or its description is wrong"
                )
        return function(*args, **kwargs)


def load_exactly(module: nn.Module, path: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Load weights into the module that their file describes; names and shapes must match, and values be finite."""
    state = read_state(path) if state is None else state
    check_finite(path, state)
    wanted = module.state_dict()
    if wrong := misfits(state, wanted):
        raise ValueError(f"{path} does not match its description: {shorten(wrong)}")
    missing, unexpected = module.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"{path} does not match its description: missing {shorten(missing)}; not expected {shorten(unexpected)}"
        )


def misfits(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Describe tensors with wrong shapes, and integers or complex numbers in place of floating-point weights."""
    both = [(name, state[name], tensor) for name, tensor in wanted.items() if name in state]
    return [
        f"{name} is {list(found.shape)}, expected {list(tensor.shape)}"
        if found.shape != tensor.shape
        else f"{name} is {found.dtype}, expected {tensor.dtype}"
        for name, found, tensor in both
        if found.shape != tensor.shape or (tensor.is_floating_point() and not found.is_floating_point())
    ]


def shorten(names: list[str], limit: int = 4) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest if names else "nothing"


@contextmanager
def within_size_of(path: Path, more: int = 0) -> Iterator[None]:
    """Limit the size of a network that is built inside the context by the size of its file of weights.

    Args:
        path: the file of weights.
        more: number of additional elements that the caller requests.
    """
    size = path.stat().st_size
    with Budget(size + SPARE + more, size // BYTES_OF_A_TENSOR + SPARE_TENSORS, str(path)):
        yield
