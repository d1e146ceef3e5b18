"""The embedded engine: PyTorch on this machine's CPU or GPU. `engine.LocalEngine` is its only public name."""
