"""FP8 in Triton's interpreter, whose own conversion is wrong.

It drops the carry when a mantissa rounds up: 31.5 becomes 16, not 32. So where the interpreter
runs, tests of kernels that cast to FP8 let torch convert. On a GPU nothing is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megascale_kernels.quantize import E4M3, E5M2


@pytest.fixture
def right_fp8_conversion(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Round to nearest even in both formats."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    formats = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}
    others = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target in formats:
            floats = torch.from_numpy(np.ascontiguousarray(values))
            assert floats.dtype == torch.float32, "kernels widen before they cast"
            return floats.to(formats[target]).view(torch.uint8).numpy()
        if source in formats:
            data = torch.from_numpy(np.ascontiguousarray(values)).view(formats[source])
            if target == tl.float16:  # a product's factors
                return data.half().numpy()
            assert target == tl.float32, "kernels widen to float32"
            return data.float().numpy()
        return others(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    yield
