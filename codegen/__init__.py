"""Lowers the TileLang kernels of flash_qla to CUDA source when the package is built. Needs tilelang, needs no GPU."""
