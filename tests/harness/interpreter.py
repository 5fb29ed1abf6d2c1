"""Without CUDA, Triton's kernels run in its interpreter; call this before triton is imported."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import Any

import torch


def interpret_without_cuda() -> None:
    """Select the interpreter if there is no CUDA; for the conftest of folders with kernels."""
    if not torch.cuda.is_available():
        assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
            "triton is imported already"
        )
        os.environ["TRITON_INTERPRET"] = "1"
        if importlib.util.find_spec("triton"):
            _patch_once_a_launch()


@functools.cache  # once: folders of tests each ask for it
def _patch_once_a_launch() -> None:
    """Spare the interpreter what it repeats at every call of a function within a kernel.

    For a launch it replaces the operators of triton.language, and again whenever the kernel calls a
    function, which finds most of them replaced. Here the functions that see the same modules of the
    language replace once a launch. Nor is a table built for each look-up of a type.
    """
    from triton.runtime import interpreter

    language = (interpreter.tl, interpreter.tl.core)
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    found, scalar = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    replaced: set[tuple[bool, ...]] = set()

    def type_of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, interpreter.tl.block_type) else kind
        return scalar(element) if type(element) is interpreter.tl.dtype else found(element)

    def replace_once(function: Any) -> Any:
        seen = list(function.__globals__.values())
        which = tuple(any(one is module for one in seen) for module in language)
        if which in replaced:
            return interpreter._LangPatchScope()
        replaced.add(which)
        return replace(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        replaced.clear()
        try:
            launch(self, *arguments, **options)
        finally:
            replaced.clear()

    interpreter._get_np_dtype = type_of
    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew
