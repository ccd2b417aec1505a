"""Stub: SGLang imports image transforms for models that are not served here."""

import stub_modules

__version__ = "0.29.1"
__getattr__ = stub_modules.install("torchvision")
