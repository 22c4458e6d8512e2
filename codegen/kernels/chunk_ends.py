"""Where the parts of a split sequence end: the pass of chunk_fwd without Q and O. Its docstrings say what it makes."""

from typing import Any

from ..configs import Config
from .chunk_fwd import PASS_CONFIG, build_pass

__all__ = ["PASS_CONFIG", "build"]


def build(cfg: Config) -> Any:
    """The TileLang function of one configuration."""
    return build_pass(cfg, output=False)
