"""The TileLang kernels, one file each. A kernel module has `build(cfg)`, which returns the TileLang function of a configuration."""
