def cache_compile(*args, **kwargs):
    raise NotImplementedError("torchair.inference.cache_compile is not emulated")
