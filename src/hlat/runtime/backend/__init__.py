"""Devices and the libraries below PyTorch: the only code that knows device types."""
