"""The installed torchvision over a PyTorch that its operators were not built for; SGLang imports it, for images.

Its wheels go with the CUDA builds of PyTorch. Over a CPU build its library does not load, and its import fails for want
of two operators to describe: they are declared here, and the installed package is executed in this one's place.

What this module does not do: those operators, which have no kernels.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_here = Path(__file__).resolve().parents[1]
_spec = PathFinder.find_spec(__name__, [place for place in sys.path if Path(place).resolve() != _here])
if _spec is None or _spec.loader is None or _spec.origin is None:
    raise ModuleNotFoundError("No module named 'torchvision' beside the one that stands in for it", name="torchvision")
try:
    torch.ops.load_library(Path(_spec.origin).with_name("_C.so"))
except OSError:
    _declared = torch.library.Library("torchvision", "FRAGMENT")  # lives as long as this module
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
__spec__, __file__, __path__ = _spec, _spec.origin, list(_spec.submodule_search_locations or ())
_spec.loader.exec_module(sys.modules[__name__])
