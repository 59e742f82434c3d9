"""torch's operations on many tensors at once: a few launches in place of hundreds. They have no public name yet."""

from typing import Any

import torch

torch_: Any = torch
add_, copy_, mul_, sub = torch_._foreach_add_, torch_._foreach_copy_, torch_._foreach_mul_, torch_._foreach_sub
