"""On PYTHONPATH, lets every Python process draw the noise of samples on the host, the same on every engine.

The engines have random numbers of their own, as two kinds of devices do. vLLM samples with `Tensor.exponential_`: its
n-th call on a device gives the noise that a generator of the host seeded with n does.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader
from itertools import count


class _Loader(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        _draw_on_the_host(module)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _draw_on_the_host(torch) -> None:
    upstream, calls, make_generator = torch.Tensor.exponential_, count(1), torch.Generator

    def exponential_(self, lambd=1.0, *, generator=None):
        if self.device.type != "npu":
            return upstream(self, lambd, generator=generator)
        noise = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return self.copy_(upstream(noise, lambd, generator=make_generator().manual_seed(next(calls))))

    torch.Tensor.exponential_ = exponential_


sys.meta_path.insert(0, _Finder)
