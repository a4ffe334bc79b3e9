import importlib


def resolve_obj_by_qualname(qualname: str) -> "Any":
    module, name = qualname.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)
