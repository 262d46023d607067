"""Declare the operations that torchvision asks for when it is imported, where its compiled part cannot be loaded.

Its wheel needs CUDA's libraries, which the CPU wheel of torch does not bring. Models and data sets do not use them.
"""

from __future__ import annotations

import sys

import torch

try:
    import torchvision  # type: ignore[import-untyped, unused-ignore]
except RuntimeError as error:
    if "operator torchvision::" not in str(error):
        raise
    for operation in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operation}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    import torchvision  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
